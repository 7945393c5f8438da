"""The distribution of attention over the rounds of a dialogue at every layer, as Round Attention observes it.

A dialogue is read once, one layer at a time, so the memory is that of the weights and of one layer's keys and values.
At each layer the attention of some tokens to each earlier round, summed over tokens and heads and normalised over
rounds, is a distribution: P_q of a question's tokens and P_a of its answer's (section 3.1, equation [1]).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.buckets import prompt_bucket
from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import DecoderLayer
from kvjax.model.rope import Angles
from kvjax.policies.signals import Signals
from kvjax.prompts import prefix_tokens, tokenize
from kvjax.rounds.selection import normalised
from kvjax.runtime.layer_forward import forward_layers
from kvjax.runtime.layer_observer import LayerObserver
from kvjax.runtime.signal_collector import PartialSignals, SignalCollector
from pallas_kernels.kept_tokens import KeptTokens

Messages = Sequence[Mapping[str, Any]]
#: First token and the one after the last.
Span = tuple[int, int]


def question_mass(lm: LanguageModel, messages: Messages, question: str) -> Float[np.ndarray, "L R"]:
    """[layer, round] attention of the question's last token to the earlier rounds, over heads; each row sums to 1.

    Raises:
      UsageError: messages in another order than a history's, fewer than two rounds, or more than the context holds.
    """
    ids, edges = _history(lm, messages)
    ids = ids + _question_ids(lm, question)
    return _masses(lm, ids, edges, [(len(ids) - 1, len(ids))])[0]


def question_and_answer_mass(
    lm: LanguageModel, messages: Messages, question: str, answer: str
) -> tuple[Float[np.ndarray, "L R"], Float[np.ndarray, "L R"], Float[np.ndarray, " R"]]:
    """P_q and P_a of a round after these messages, each [layer, round], and each round's part of the tokens [round].

    The answer is read as it is given, as if the model had said it. Rows sum to 1.

    Raises:
      UsageError: as :func:`question_mass`, or an answer without tokens.
    """
    ids, edges = _history(lm, messages)
    asked, said = _question_ids(lm, question), lm.tokenizer.encode_after(answer)
    if not said:
        raise UsageError("An answer has no tokens; nothing attends to earlier rounds.")
    spans = [(len(ids), len(ids) + len(asked)), (len(ids) + len(asked), len(ids) + len(asked) + len(said))]
    of_question, of_answer = _masses(lm, ids + asked + said, edges, spans)
    return of_question, of_answer, normalised(np.diff(edges).astype(np.float64))


def _history(lm: LanguageModel, messages: Messages) -> tuple[list[int], list[int]]:
    """Ids of the messages, and the edges of their rounds; what comes before the first is no round's."""
    from kvjax.history import history_ids

    ids, starts = history_ids(lm, messages)
    if len(starts) < 2:
        raise UsageError("A dialogue has fewer than two rounds before its question; nothing is distributed over one.")
    return ids, [max(prefix_tokens(lm, list(messages), ids), 4), *starts[1:], len(ids)]


def _question_ids(lm: LanguageModel, question: str) -> list[int]:
    """Ids of a question after a history, in the model's chat template."""
    asked = [{"role": "user", "content": question}]
    return list(tokenize(lm, asked, context=None, chat=True, onto=True).prompts[0])


def _masses(
    lm: LanguageModel, ids: Sequence[int], edges: Sequence[int], spans: Sequence[Span]
) -> Float[np.ndarray, "S L R"]:
    """Attention of each span's tokens to what lies between the edges, over heads, by layer; normalised."""
    config = lm.config
    if config.sliding:
        raise UsageError(
            "Layers of this model see a window of tokens, so no layer's attention spreads over all rounds."
        )
    if len(ids) > config.max_position:
        raise UsageError(f"A dialogue has {len(ids)} tokens; this model's context is {config.max_position}.")
    longest = max(end - first for first, end in spans)
    # One token is a size of its own, since calibration asks for nothing else; others share buckets.
    window = 1 if longest == 1 else min(prompt_bucket(longest), prompt_bucket(len(ids)))
    observer = SpanAttention(jnp.asarray(spans, jnp.int32), config, window)
    by_layer = []
    for _, masses in forward_layers(lm.params, [ids], observer):
        running = np.pad(np.cumsum(np.asarray(masses), axis=1, dtype=np.float64), ((0, 0), (1, 0)))
        by_layer.append([normalised(total) for total in np.diff(running[:, edges])])
    return np.stack(by_layer, axis=1)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("spans",), meta_fields=("config", "window"))
@dataclasses.dataclass(frozen=True)
class SpanAttention(LayerObserver):
    """Observes the attention of each span's tokens to every token of one dialogue, summed over them and heads: [S, T].

    Attributes:
      spans: first token of each, and the one after its last.
      window: static; at least the tokens of the longest span.
    """

    spans: Int[Array, "S 2"]
    config: ModelConfig
    window: int

    def before_layer(self, layer: DecoderLayer, x: Float[Array, "1 T M"], rope: Angles) -> list[Any]:
        """A collector for each span, and its queries."""
        return [(each, each.before_layer(layer, x, rope)) for each in self._collectors(layer.sink_logits)]

    def finish(
        self, partial: None, before: list[Any], k: Float[Array, "1 H T D"], kept: KeptTokens | None
    ) -> Float[Array, "S T"]:
        """The masses, once all keys are there."""
        masses = []
        for collector, window in before:
            found = collector.finish(PartialSignals(None, None), window, k, kept)
            assert found.window is not None
            masses.append(found.window.new.sum(axis=(0, 1, 2)))
        return jnp.stack(masses)

    def _collectors(self, sinks: Float[Array, "H G"] | None) -> list[SignalCollector]:
        scale, none = jnp.full((1,), self.config.attention_scale, jnp.float32), jnp.zeros((1,), jnp.int32)
        return [
            SignalCollector(
                Signals(window=self.window), self.config, none, end[None], first[None], scale, self.window, sinks
            )
            for first, end in self.spans
        ]
