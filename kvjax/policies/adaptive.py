"""AdaptiveHeads: the heads of a layer share its budget, by their scores (Ada-KV, Feng et al., arXiv 2407.11550)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache.pool import LayerCache
from kvjax.checks import number
from kvjax.policies.base import Candidates, PromptChunk, Selection, floor_fraction, selection, top_mask
from kvjax.policies.expected_attention import ExpectedAttention
from kvjax.policies.inner import Rescoring
from kvjax.policies.sized import Selecting


@dataclasses.dataclass(frozen=True)
class AdaptiveHeads(Rescoring):
    """Keep a layer's highest scores, whatever head they belong to (Ada-KV, arXiv 2407.11550, algorithm 1).

    ``inner`` is any policy that scores every token, ExpectedAttention unless another is given. Of H heads with budget b
    each, the H b highest of all their scores stay; the ``floor`` part of b is kept for each head's own highest, so that
    none is left without. ``floor=1`` is the inner policy itself. Scores of different heads are compared as they are,
    as in NVIDIA's kvpress: attention of one query sums to 1 in each head, and other scores are what they are.

    The bytes are really those of the budget: a row's pages are divided among its heads as the row has chosen, in place
    of masks over equal heads. Chosen once a prompt; decoded tokens all stay; on a later turn the layer's budget is
    divided anew over kept, generated and new tokens. What the inner policy protects stays in its head.

    Size: ``budget`` tokens a head on average (2,048 when nothing is given) or ``ratio`` of the row's tokens; none in
    ``inner``.
    """

    layers_alike: ClassVar[bool] = True
    shares_slots: ClassVar[bool] = True

    floor: float = 0.2

    def __post_init__(self) -> None:
        number("floor", self.floor, 0, 1)
        super().__post_init__()

    def usual(self) -> Selecting:
        return ExpectedAttention()

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        return self.inner_scores(layer, cache, candidates, chunk)

    def select(self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> Selection:
        batch, heads, count = candidates.k.shape[:3]
        size, valid = self.size(chunk.config, layer, chunk.total), candidates.valid
        sure = self.protected(candidates, chunk) & valid
        sure = sure | self.of_turn(candidates, chunk, size, sure)
        scores = self.scores(layer, cache, candidates, chunk)
        least = jnp.maximum(floor_fraction(self.floor, size), 1)[:, None]
        sure = sure | top_mask(scores, jnp.maximum(least - sure.sum(axis=-1, dtype=jnp.int32), 0), valid & ~sure)
        budget = (heads * size)[:, None]
        free = jnp.maximum(budget - sure.sum(axis=(1, 2), dtype=jnp.int32)[:, None], 0)

        def layer_wide(x: Array) -> Array:
            return x.reshape(batch, 1, heads * count)

        keep = top_mask(layer_wide(scores), free, layer_wide(valid & ~sure)).reshape(sure.shape) | sure
        whole = (candidates.length.sum(axis=1, keepdims=True) <= budget) | (chunk.count == 0)[:, None]
        keep = jnp.where(whole[..., None], valid, keep)
        marks = self.marks_after(layer, cache, candidates, chunk)
        return selection(cache, candidates, keep, marks, state=self.state_after(layer, cache, candidates, chunk))
