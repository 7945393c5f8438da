"""ChunkKV: whole runs of neighbouring tokens stay or leave together (Liu et al., arXiv 2502.00299)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache.pool import LayerCache
from kvjax.checks import MOST_SLOTS, true_or_false, whole_number
from kvjax.policies.base import Candidates, PromptChunk
from kvjax.policies.inner import Rescoring
from kvjax.policies.keydiff import KeyDiff
from kvjax.policies.sized import Selecting


@dataclasses.dataclass(frozen=True)
class ChunkKV(Rescoring):
    """Keep whole runs of ``chunk`` neighbouring tokens, by their mean scores (ChunkKV, arXiv 2502.00299).

    ``inner`` is any policy that scores every token: KeyDiff, unless another is given. Its tokens are cut into chunks
    from the row's beginning, the last one shorter; the best chunks by mean score stay, and the first that the budget
    does not hold whole gives its own best tokens. With ``together`` the scores are averaged over the KV heads of the
    layer, which then keep the same tokens, as in NVIDIA's kvpress; without, each head chooses by itself.

    What the inner policy protects stays as it does there, and takes no part in a mean. On a later turn chunks are cut
    anew out of what is there: kept, generated and new tokens, in order. Chosen once a prompt; decoded tokens all stay.

    Size: ``budget`` tokens a head (2,048 when nothing is given) or ``ratio`` of the row's tokens; none in ``inner``.

    Decided where paper and kvpress differ: the paper scores by the attention of a window of last queries, which is
    ``inner=snapkv(kernel=1)``, and reuses one layer's choice in the next ones, which is not done; kvpress keeps whole
    chunks alone, so that up to one chunk of the budget is not used.
    """

    layers_alike: ClassVar[bool] = True

    chunk: int = 20
    together: bool = True

    def __post_init__(self) -> None:
        whole_number("chunk", self.chunk, 2, MOST_SLOTS)
        true_or_false("together", self.together)
        super().__post_init__()

    def usual(self) -> Selecting:
        return KeyDiff()

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        scores = self.inner_scores(layer, cache, candidates, chunk)
        if self.scoring.log_scores:
            scores = jnp.exp(scores)  # a chunk's mean is that of weights
        if self.together:
            mean = cache.sharding.mean_over_heads(scores.mean(axis=1, keepdims=True))
            scores = jnp.broadcast_to(mean, scores.shape)
        return by_chunk(scores, candidates.valid & ~self.protected(candidates, chunk), self.chunk)


def by_chunk(scores: Float[Array, "B H N"], counted: Bool[Array, "B H N"], chunk: int) -> Float[Array, "B H N"]:
    """Ranks of tokens, 0 for the lowest: by their chunk's mean of the ``counted`` scores, then by their own.

    Of equal chunks, and of equal tokens of a chunk, the later rank higher. What is not counted ranks anywhere.
    """
    size = scores.shape[-1]
    runs = [jnp.pad(x, ((0, 0), (0, 0), (0, -size % chunk))) for x in (jnp.where(counted, scores, 0.0), counted)]
    total, count = (x.reshape(*x.shape[:2], -1, chunk).sum(axis=-1) for x in runs)
    mean = jnp.where(count > 0, total / jnp.maximum(count, 1), -jnp.inf)
    place = jnp.arange(size)
    mean = jnp.take(mean, place // chunk, axis=-1)
    number, index = (jnp.broadcast_to(x, scores.shape) for x in (place // chunk, place))
    *_, order = jax.lax.sort((mean, number, scores, index), dimension=-1, num_keys=3, is_stable=True)
    _, rank = jax.lax.sort((order, index), dimension=-1, num_keys=1)
    return rank.astype(jnp.float32)  # exact to 2^24
