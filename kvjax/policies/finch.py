"""Finch: what the question at a prompt's end attends to (Corallo and Papotti, arXiv 2408.00167)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache.pool import LayerCache
from kvjax.checks import MOST_SLOTS, optional, whole_number
from kvjax.policies.base import Candidates, PromptChunk, Signals
from kvjax.policies.pooling import over_group, window_mass
from kvjax.policies.snapkv import Observing


@dataclasses.dataclass(frozen=True)
class Finch(Observing):
    """Keep what the question at the prompt's end attends to (Finch, arXiv 2408.00167).

    The last ``window`` tokens stand for the question and stay. A token's score is the attention their queries give it,
    each query's times the number of tokens up to it, since its softmax spreads over so many; summed over the queries,
    the mean over the query heads of a group. With ``chunk``, the prefix is cut into chunks of so many tokens from the
    row's beginning, and each keeps the same fraction of its tokens, its highest scores; without, the prefix is chosen
    from as a whole. Chosen once a prompt; decoded tokens all stay.

    Size: ``budget`` tokens a head (2,048 when nothing is given) or ``ratio`` of the row's tokens, window included.

    Decided where the paper, its authors' code in NVIDIA's kvpress and this library differ: the paper reads the
    document chunk by chunk, each followed by the question; as in kvpress, it is read whole here, and chunks share the
    budget. kvpress finds the question by a delimiter token, counts one token less for each query, and may renumber
    positions; here the question is a number of tokens, and positions are the original ones. On a later turn the
    queries are the turn's own last ones, and each counts as many tokens as the row has seen up to it.
    """

    layers_alike: ClassVar[bool] = True

    chunk: int | None = None

    def __post_init__(self) -> None:
        optional(lambda name, value: whole_number(name, value, 2, MOST_SLOTS))("chunk", self.chunk)
        super().__post_init__()

    @property
    def attention_scores(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether scores are attention: ranks within chunks are not."""
        return self.chunk is None

    @property
    def signals(self) -> Signals:
        return Signals(window=self.window, window_by_keys=True)

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        scores = over_group(window_mass(candidates), "mean")
        if self.chunk is None:
            return scores
        return by_rank(scores, candidates.valid & ~self.protected(candidates, chunk), self.chunk)


def by_rank(scores: Float[Array, "B H N"], counted: Bool[Array, "B H N"], chunk: int) -> Float[Array, "B H N"]:
    """Ranks within chunks of ``chunk`` neighbours, as fractions of the chunk, so that chunks keep equal fractions.

    The best of n ``counted`` tokens has -1/n, the worst -1; of equal scores the later is better.
    """
    size = scores.shape[-1]
    tail = ((0, 0), (0, 0), (0, -size % chunk))
    values, here = (
        jnp.pad(x, tail).reshape(*x.shape[:2], -1, chunk) for x in (jnp.where(counted, scores, -jnp.inf), counted)
    )
    index = jnp.broadcast_to(jnp.arange(chunk), values.shape)
    # Ascending by (counted, score, place): what does not count comes first.
    *_, order = jax.lax.sort((here.astype(jnp.int32), values, index), dimension=-1, num_keys=3)
    _, above = jax.lax.sort((order, chunk - index), dimension=-1, num_keys=1)
    fraction = above / jnp.maximum(here.sum(axis=-1, keepdims=True), 1)
    return -fraction.reshape(*scores.shape[:2], -1)[..., :size].astype(jnp.float32)
