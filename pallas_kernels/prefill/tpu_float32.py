"""Float32 blocks in the TPU's prefill: cut into three bfloat16 numbers, whose six largest products are summed.

That is what ``Precision.HIGHEST`` does. There the compiler holds a block's parts and sums in registers, of which there
are too few. Here the parts lie in memory: of queries once a block of queries, of keys, values and weights once a block
of keys. The six products of scores are one product of six times the channels, the smallest first, done in chunks as
long as the matrix units hold; what one chunk leaves in memory the next adds to. Weighed values have a sum for each of
the six products, which meet in the last block.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import tpu_tiles
from pallas_kernels.ragged_decode.tpu_float32 import PARTS, cut_parts, dot, rounded_parts
from pallas_kernels.tpu_tiles import LANES, Tiles

#: Which part of one side is multiplied with which of the other, the smallest product first.
_PAIRS = ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0))
#: Contracted at once: as much as all matrix units hold side by side, so that no sum waits in registers for the next.
_CHUNK = 512


def sums(t: Tiles) -> int:
    """Of weighed values."""
    return len(_PAIRS) * len(tpu_tiles.steps(t.keys, _CHUNK))


def scratch(t: Tiles) -> list[Any]:
    """What :class:`Blocks` takes."""
    dim = t.shape[4]
    wide = len(_PAIRS) * dim
    shapes = [(t.rows, wide), _lying(t, wide), (PARTS, *_lying(t, dim)), (PARTS, t.rows, t.keys)]
    return [pltpu.VMEM(shape, jnp.bfloat16) for shape in shapes]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The parts of a block, in memory.

    Attributes:
      queries: [rows, 6 D]. keys: [keys, 6 D], or transposed. values: [3, ...] as they lie. weights: [3, rows, keys].
    """

    t: Tiles
    queries: Any
    keys: Any
    values: Any
    weights: Any

    def take_queries(self, q: Any, factor: Array) -> None:
        """Times a factor, which scores then need not be."""
        for g in range(q.shape[0]):
            for rows in tpu_tiles.steps(self.t.queries, 64):
                parts = rounded_parts(q[g, rows] * factor)
                at = slice(g * self.t.queries + rows.start, g * self.t.queries + rows.stop)
                self.queries[at] = jnp.concatenate([parts[i] for i, _ in _PAIRS], axis=1)

    def take_keys(self, k: Any, v: Any) -> None:
        axis = 0 if self.t.columns else 1
        for tokens in tpu_tiles.steps(self.t.keys, LANES):
            at = (slice(None), tokens) if self.t.columns else (tokens, slice(None))
            parts = cut_parts(k[at])
            self.keys[at] = jnp.concatenate([parts[j] for _, j in _PAIRS], axis=axis)
            for i, part in enumerate(cut_parts(v[at])):
                self.values[i, *at] = part

    def take_weights(self, part: int, rows: slice, weights: list[Float[Array, "R 128"]]) -> None:
        for i, x in enumerate(weights):
            at = part * self.t.part + i * LANES
            for j, y in enumerate(rounded_parts(x)):
                self.weights[j, rows, at : at + LANES] = y

    def first_chunks(self) -> list[slice]:
        """All but the last, of the six times channels."""
        return self._chunks()[:-1]

    def add_scores(self, score: Any, chunk: slice) -> None:
        """What one of the first chunks adds, for as many keys at once as a matrix unit is wide."""
        for part in range(self.t.parts):
            for keys in tpu_tiles.steps(self.t.part, tpu_tiles.matrix_unit()):
                found = self._product(chunk, part, keys)
                score[part, :, keys] = found + score[part, :, keys] if chunk.start else found

    def last_scores(self, score: Any, part: int) -> Float[Array, "M S"]:
        """Of a part, all chunks summed."""
        chunk = self._chunks()[-1]
        found = self._product(chunk, part, slice(0, self.t.part))
        return found + score[part, :, : self.t.part] if chunk.start else found

    def gather(self, total: Any, shrink: Any) -> None:
        """What the weights weigh, each product added to a sum of its own."""
        pairs = ((keys, pair) for keys in tpu_tiles.steps(self.t.keys, _CHUNK) for pair in _PAIRS)
        for into, (keys, (i, j)) in enumerate(pairs):
            values = self.values[j, :, keys] if self.t.columns else self.values[j, keys]
            weighed = dot(self.weights[i, :, keys], values, 1 if self.t.columns else 0)
            total[into] = total[into] * tpu_tiles.across(shrink[...], total.shape[2]) + weighed

    def _chunks(self) -> list[slice]:
        """The last so short that the matrix units hold it for a whole part."""
        wide = self.queries.shape[1]
        last = LANES * -(-max(wide - _CHUNK // 2, 0) // LANES)
        return [*tpu_tiles.steps(last, _CHUNK), slice(last, wide)]

    def _product(self, chunk: slice, part: int, keys: slice) -> Array:
        """Of the channels of a chunk with some keys of a part."""
        at = slice(part * self.t.part + keys.start, part * self.t.part + keys.stop)
        block = self.keys[chunk, at] if self.t.columns else self.keys[at, chunk]
        return dot(self.queries[:, chunk], block, 0 if self.t.columns else 1)


def _lying(t: Tiles, channels: int) -> tuple[int, int]:
    return (channels, t.keys) if t.columns else (t.keys, channels)
