"""How attention is shared among the rounds of a dialogue, at every layer: what Round Attention's observations are of.

A dialogue is read once, one layer at a time, so the memory is that of the weights and of one layer's keys and values.
At each layer the attention of some tokens to each earlier round, summed over tokens and heads and normalised over
rounds, is a distribution: P_q of a question's tokens and P_a of its answer's (section 3.1, equation [1]).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.buckets import block_of, prompt_bucket
from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.rope import Angles, token_angles
from kvjax.policies.signals import Signals
from kvjax.prompts import prefix_tokens, tokenize
from kvjax.rounds.selection import normalised
from kvjax.runtime.prefill import read_layer
from kvjax.runtime.signal_collector import PartialSignals, SignalCollector

Messages = Sequence[Mapping[str, Any]]
#: First token and the one after the last.
Span = tuple[int, int]


def round_shares(lm: LanguageModel, messages: Messages, question: str) -> Float[np.ndarray, "L R"]:
    """[layer, round] attention of the question's last token to the earlier rounds, over heads; each row sums to 1.

    Raises:
      UsageError: messages in another order than a history's, fewer than two rounds, or more than the context holds.
    """
    ids, edges = _history(lm, messages)
    ids = ids + _asked(lm, question)
    return _shares(lm, ids, edges, [(len(ids) - 1, len(ids))])[0]


def question_and_answer(
    lm: LanguageModel, messages: Messages, question: str, answer: str
) -> tuple[Float[np.ndarray, "L R"], Float[np.ndarray, "L R"], Float[np.ndarray, " R"]]:
    """P_q and P_a of a round after these messages, each [layer, round], and each round's share of the tokens [round].

    The answer is read as it is given, as if the model had said it. Rows sum to 1.

    Raises:
      UsageError: as :func:`round_shares`, or an answer without tokens.
    """
    ids, edges = _history(lm, messages)
    asked, said = _asked(lm, question), lm.tokenizer.encode(answer)
    if not said:
        raise UsageError("An answer has no tokens; nothing attends to earlier rounds.")
    spans = [(len(ids), len(ids) + len(asked)), (len(ids) + len(asked), len(ids) + len(asked) + len(said))]
    of_question, of_answer = _shares(lm, ids + asked + said, edges, spans)
    return of_question, of_answer, normalised(np.diff(edges).astype(np.float64))


def _history(lm: LanguageModel, messages: Messages) -> tuple[list[int], list[int]]:
    """Ids of the messages, and the edges of their rounds; what comes before the first is no round's."""
    from kvjax.history import history_ids

    ids, starts = history_ids(lm, messages)
    if len(starts) < 2:
        raise UsageError("A dialogue has fewer than two rounds before its question; nothing is distributed over one.")
    return ids, [max(prefix_tokens(lm, list(messages), ids), 4), *starts[1:], len(ids)]


def _asked(lm: LanguageModel, question: str) -> list[int]:
    """Ids of a later question as a turn feeds them."""
    asked = [{"role": "user", "content": question}]
    return list(tokenize(lm, asked, context=None, chat=True, onto=True).prompts[0])


def _shares(
    lm: LanguageModel, ids: Sequence[int], edges: Sequence[int], spans: Sequence[Span]
) -> Float[np.ndarray, "S L R"]:
    """Attention of each span's tokens to what lies between the edges, over heads, by layer; normalised."""
    config = lm.config
    if len(ids) > config.max_position:
        raise UsageError(f"A dialogue has {len(ids)} tokens; this model's context is {config.max_position}.")
    padded = np.zeros((1, prompt_bucket(len(ids))), np.int32)
    padded[0, : len(ids)] = ids
    count = jnp.full((1,), len(ids), jnp.int32)
    angles = token_angles(config, jnp.arange(padded.shape[1])[None], count)
    longest = max(end - first for first, end in spans)
    # One token is a size of its own, since calibration asks for nothing else; others share buckets.
    window = 1 if longest == 1 else min(prompt_bucket(longest), padded.shape[1])
    x = _embed(lm.params, jnp.asarray(padded))
    shares = []
    for layer in lm.params.layers:
        x, masses = _layer(layer, x, angles, count, jnp.asarray(spans, jnp.int32), window=window)
        running = np.pad(np.cumsum(np.asarray(masses), axis=1, dtype=np.float64), ((0, 0), (1, 0)))
        shares.append([normalised(total) for total in np.diff(running[:, edges])])
    return np.stack(shares, axis=1)


@jax.jit
def _embed(params: Decoder, tokens: Int[Array, "1 T"]) -> Float[Array, "1 T M"]:
    return params.embed(tokens)


@functools.partial(jax.jit, donate_argnames=("x",), static_argnames=("window",))
def _layer(
    layer: DecoderLayer,
    x: Float[Array, "1 T M"],
    angles: Angles,
    count: Int[Array, " 1"],
    spans: Int[Array, "S 2"],
    *,
    window: int,
) -> tuple[Float[Array, "1 T M"], Float[Array, "S T"]]:
    """One layer over a dialogue: hidden states out, and the attention of each span's tokens to each, over heads.

    ``window``: at least the tokens of the longest span.
    """
    config = layer.config
    block = block_of(x.shape[1])
    blocks = (count[0] + block - 1) // block
    scale = jnp.full((1,), config.attention_scale, jnp.float32)
    after, k, _, _ = read_layer(layer, x, angles, None, blocks, jnp.int32(0), None, count)
    masses = []
    for first, end in spans:
        collector = SignalCollector(
            Signals(window=window), config, jnp.zeros_like(count), end[None], first[None], scale, window
        )
        found = collector.finish(PartialSignals(None, None), collector.window_queries(layer, x, angles), k, None, block)
        assert found.window is not None
        masses.append(found.window.new.sum(axis=(0, 1, 2)))
    return after, jnp.stack(masses)
