"""Float32 blocks in the TPU's prefill: weights and values are cut into three bfloat16 numbers, as
:mod:`pallas_kernels.tpu.float32_scores` cuts queries and keys.

The parts lie in memory: of values once a block of keys. Weighed values have a sum for each of the six products, which
meet in the last block.
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

#: Keys whose values are weighed at once: as many as all matrix units hold side by side.
_CHUNK = 512


def sums(t: Tiles) -> int:
    """Of weighed values."""
    return len(PAIRS) * len(tiles.steps(t.keys, _CHUNK))


def scratch(t: Tiles) -> list[Any]:
    """What :class:`Blocks` takes."""
    dim = t.shape[4]
    values = (dim, t.keys) if t.columns else (t.keys, dim)
    shapes = [(PARTS, *values), (PARTS, t.rows, t.keys)]
    return [*float32_scores.parts_scratch(t), *(pltpu.VMEM(shape, jnp.bfloat16) for shape in shapes)]


@dataclasses.dataclass(frozen=True)
class Blocks(float32_scores.Parts):
    """Those of queries and keys, and of values and weights.

    Attributes:
      values: [3, ...] as they lie. weights: [3, rows, keys].
    """

    values: Any
    weights: Any

    def take_values(self, v: Any) -> None:
        for tokens in tiles.steps(self.t.keys, LANES):
            at = (slice(None), tokens) if self.t.columns else (tokens, slice(None))
            for i, part in enumerate(cut_parts(v[at])):
                self.values[i, *at] = part

    def take_weights(self, part: int, rows: Any, weights: list[Float[Array, "R 128"]]) -> None:
        for i, x in enumerate(weights):
            at = part * self.t.part + i * LANES
            for j, y in enumerate(rounded_parts(x)):
                self.weights[j, rows, at : at + LANES] = y

    def add_scores(self, score: Any, chunk: slice) -> None:
        """What one of the first chunks adds, for as many keys at once as a matrix unit is wide."""
        for part in range(self.t.parts):
            for keys in tiles.steps(self.t.part, tiles.matrix_unit()):
                found = self._of_all(part, keys, chunk)
                score[part, :, keys] = found + score[part, :, keys] if chunk.start else found

    def last_scores(self, score: Any, part: int) -> Float[Array, "M S"]:
        """Of a part, all chunks summed."""
        *others, chunk = self.chunks()
        found = self._of_all(part, slice(0, self.t.part), chunk)
        return found + score[part, :, : self.t.part] if others else found

    def gather(self, total: Any, shrink: Any) -> None:
        """What the weights weigh, each product added to a sum of its own, as many channels as a matrix unit is wide."""
        pairs = ((keys, pair) for keys in tiles.steps(self.t.keys, _CHUNK) for pair in PAIRS)
        for into, (keys, (i, j)) in enumerate(pairs):
            for channels in tiles.steps(total.shape[2], tiles.matrix_unit()):
                values = self.values[j, channels, keys] if self.t.columns else self.values[j, keys, channels]
                weighed = dot(self.weights[i, :, keys], values, 1 if self.t.columns else 0)
                lower = tiles.across(shrink[...], channels.stop - channels.start)
                total[into, :, channels] = total[into, :, channels] * lower + weighed

    def _of_all(self, part: int, keys: slice, chunk: slice) -> Float[Array, "M S"]:
        found = self.product(slice(0, self.t.shape[2]), slice(0, self.t.queries), part, keys, chunk)
        return found.reshape(self.t.rows, -1)
