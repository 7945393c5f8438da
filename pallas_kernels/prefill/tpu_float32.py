"""Float32 blocks of the TPU's prefill kernel: weights and values in three bfloat16 parts, stored in VMEM.

:mod:`pallas_kernels.tpu.float32_scores` does the same for queries and keys. Weighted values have a sum for each of the
six products of parts; they are added up in the last block.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.tpu import float32_scores, tiles
from pallas_kernels.tpu.bfloat16_parts import PARTS, cut_parts, dot, rounded_parts
from pallas_kernels.tpu.float32_scores import PAIRS
from pallas_kernels.tpu.tiles import LANES, Tiles

#: Keys whose values are weighted at once: as many as all matrix units hold together.
_CHUNK = 512


def sums(t: Tiles) -> int:
    """Number of separate sums of weighted values."""
    return len(PAIRS) * len(tiles.steps(t.keys, _CHUNK))


def scratch(t: Tiles) -> list[Any]:
    """Scratch buffers of :class:`Blocks`."""
    dim = t.shape[4]
    values = (dim, t.keys) if t.columns else (t.keys, dim)
    shapes = [(PARTS, *values), (PARTS, t.rows, t.keys)]
    return [*float32_scores.parts_scratch(t), *(pltpu.VMEM(shape, jnp.bfloat16) for shape in shapes)]


@dataclasses.dataclass(frozen=True)
class Blocks(float32_scores.Parts):
    """Bfloat16 parts of queries and keys, and of values and weights.

    Attributes:
      values: [3, keys, D], or transposed as the keys are. weights: [3, rows, keys].
    """

    values: Any
    weights: Any

    def take_values(self, v: Any) -> None:
        """Store the parts of a block of values."""
        for tokens in tiles.steps(self.t.keys, LANES):
            at = (slice(None), tokens) if self.t.columns else (tokens, slice(None))
            for i, part in enumerate(cut_parts(v[at])):
                self.values[i, *at] = part

    def take_weights(self, part: int, rows: Any, weights: list[Float[Array, "R 128"]]) -> None:
        """Store the parts of a part's weights."""
        for i, x in enumerate(weights):
            at = part * self.t.part + i * LANES
            for j, y in enumerate(rounded_parts(x)):
                self.weights[j, rows, at : at + LANES] = y

    def add_scores(self, score: Any, chunk: slice) -> None:
        """Add one of the first chunks of channels to the scores, a matrix unit's width of keys at a time."""
        for part in range(self.t.parts):
            for keys in tiles.steps(self.t.part, tiles.matrix_unit()):
                found = self._of_all_rows(part, keys, chunk)
                score[part, :, keys] = found + score[part, :, keys] if chunk.start else found

    def last_scores(self, score: Any, part: int) -> Float[Array, "M S"]:
        """Scores of a part, the sum of all chunks."""
        *others, chunk = self.chunks()
        found = self._of_all_rows(part, slice(0, self.t.part), chunk)
        return found + score[part, :, : self.t.part] if others else found

    def gather(self, total: Any, shrink: Any) -> None:
        """Add the weighted values: each product to a sum of its own, a matrix unit's width of channels at a time."""
        pairs = ((keys, pair) for keys in tiles.steps(self.t.keys, _CHUNK) for pair in PAIRS)
        for into, (keys, (i, j)) in enumerate(pairs):
            for channels in tiles.steps(total.shape[2], tiles.matrix_unit()):
                values = self.values[j, channels, keys] if self.t.columns else self.values[j, keys, channels]
                weighed = dot(self.weights[i, :, keys], values, 1 if self.t.columns else 0)
                lower = tiles.across(shrink[...], channels.stop - channels.start)
                total[into, :, channels] = total[into, :, channels] * lower + weighed

    def _of_all_rows(self, part: int, keys: slice, chunk: slice) -> Float[Array, "M S"]:
        found = self.product(slice(0, self.t.shape[2]), slice(0, self.t.queries), part, keys, chunk)
        return found.reshape(self.t.rows, -1)
