"""KVzip: keep what the model needs to repeat the prompt (Kim et al., arXiv 2505.23416)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache.pool import LayerCache
from kvjax.checks import MOST_SLOTS, whole_number
from kvjax.errors import UsageError, quoted
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Candidates, Policy, PromptChunk, Signals
from kvjax.policies.signals import Repetition
from kvjax.policies.sized import SelectingPastSinks

#: What the model is asked, word for word as in the authors' code.
FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
#: The least a token that was read may score: 0 is that of one no repetition was about.
_LEAST = 1e-30


@dataclasses.dataclass(frozen=True)
class KVzip(SelectingPastSinks):
    """Keep what the model attends to when it is asked to repeat the prompt, whatever will be asked (arXiv 2505.23416).

    Once a prompt is in, it is fed again, ``chunk`` tokens at a time, after the words "Repeat the previous context
    exactly." A token's score is the largest attention probability that any query of its chunk's pass gives it (equation
    2), the largest of the query heads that share the KV head, in the softmax over that chunk, the first ``sink`` tokens
    and what has been repeated so far. No question is needed, so it suits contexts that are read before one.

    The cost is one more reading of each prompt, onto itself (``stats.repeated_tokens``), while the keys and values of
    a layer exist whole, or of all layers where one program reads them. On a later turn the new tokens are repeated;
    kept tokens have the score they had, and decoded tokens, which nobody has repeated, the average. The first ``sink``
    tokens stay. Chosen once a prompt.

    Size: ``budget`` tokens a head (2,048 when nothing is given) or ``ratio`` of the row's tokens: every head as many.
    The authors' code also divides one budget among all heads.
    """

    layers_alike: ClassVar[bool] = True
    attention_scores: ClassVar[bool] = True
    marks: ClassVar[tuple[str, ...]] = ("repeated",)

    sink: int = 4
    chunk: int = 2048
    #: Token ids of the request for the first chunk, for a later one, and of what stands before the answer.
    words: tuple[tuple[int, ...], ...] = dataclasses.field(
        default=((), (), ()), kw_only=True, repr=False, metadata={"told": True}
    )

    def __post_init__(self) -> None:
        whole_number("sink", self.sink, 0, MOST_SLOTS)
        whole_number("chunk", self.chunk, 2, MOST_SLOTS)
        if not _are_words(self.words):
            raise UsageError(f"words is {quoted(self.words)}; leave it out: the model's tokenizer says it.")
        super().__post_init__()

    def with_words(self, words: Callable[[str], tuple[int, ...]], answer: Callable[[], str]) -> Policy:
        return dataclasses.replace(self, words=(words(FIRST), words(LATER), words(answer())))

    @property
    def signals(self) -> Signals:
        first, later, end = self.words
        return Signals(repeat=Repetition(self.chunk, self.sink, first, later, end))

    def notice(self, config: ModelConfig, total: int) -> str | None:
        asked = self.signals.repeat
        assert asked is not None
        end = total + min(total, self.chunk) + max(asked.request_tokens)
        if end <= config.max_position:
            return None
        return (
            f"KVzip repeats {total:,} tokens behind themselves, at positions up to {end:,}; this model knows "
            f"{config.max_position:,}, so scores may be poor: a smaller chunk takes fewer."
        )

    def marks_after(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> dict[str, Array]:
        assert candidates.signals.repeat is not None
        new = jnp.maximum(candidates.signals.repeat.max(axis=2), _LEAST)
        return {"repeated": jnp.where(candidates.fresh_rows, new, candidates.marks["repeated"])}

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        score = self.marks_after(layer, cache, candidates, chunk)["repeated"]
        return mean_where_unknown(score, candidates.valid)


def mean_where_unknown(score: Float[Array, "B H N"], valid: Bool[Array, "B H N"]) -> Float[Array, "B H N"]:
    """The scores; where one is 0, which is that of a token nobody scored, the mean of the head's others."""
    known = valid & (score > 0)
    mean = jnp.where(known, score, 0.0).sum(axis=-1, keepdims=True)
    mean = mean / jnp.maximum(known.sum(axis=-1, keepdims=True), 1)
    return jnp.where(known, score, mean)


def _are_words(words: Any) -> bool:
    """Whether these are three tuples of token ids."""
    if not isinstance(words, tuple) or len(words) != 3:
        return False
    return all(isinstance(part, tuple) and all(type(token) is int for token in part) for part in words)
