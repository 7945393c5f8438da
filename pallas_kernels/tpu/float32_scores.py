"""Scores of float32 queries and keys on TPUs: each number is cut into three of bfloat16, whose six largest products are
summed.

That is what ``Precision.HIGHEST`` does. There the compiler holds a block's parts and sums in registers, of which there
are too few. Here the parts lie in memory, and the six products of a score are one product of six times the channels,
the smallest first, done in chunks as long as the matrix units hold; what one chunk leaves in memory the next adds to.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.tpu import tiles
from pallas_kernels.tpu.bfloat16_parts import PARTS, cut_parts, dot, rounded_parts
from pallas_kernels.tpu.tiles import LANES, Tiles

#: Which part of queries is multiplied with which of keys, the smallest product first.
PAIRS = ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0))
#: Contracted at once: as much as all matrix units hold side by side, so that no sum waits in registers for the next.
_CHUNK = 512


def scratch(t: Tiles) -> list[Any]:
    """What :class:`Products` takes."""
    return [*parts_scratch(t), pltpu.VMEM((t.parts, t.shape[2], t.queries, t.part), jnp.float32)]


def parts_scratch(t: Tiles) -> list[Any]:
    """What :class:`Parts` takes."""
    _, _, group, _, dim = t.shape
    keys = (PARTS * dim, t.keys) if t.columns else (t.keys, PARTS * dim)
    return [pltpu.VMEM(shape, jnp.bfloat16) for shape in ((group, t.queries, len(PAIRS) * dim), keys)]


def scratch_bytes(shapes: list[Any]) -> int:
    """Of them all."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in shapes)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a block, in memory.

    Attributes:
      queries: [G, N, 6 D], as they are paired. keys: [keys, 3 D], or transposed.
    """

    t: Tiles
    queries: Any
    keys: Any

    def take_queries(self, q: Any, factor: Array) -> None:
        """Times a factor, which scores then need not be. In a loop: parts side by side in a tile are turned there."""

        def cut(head: Array, queries: Any, _: Any) -> None:
            parts = rounded_parts(q[head, queries] * factor)
            self.queries[head, queries] = jnp.concatenate([parts[i] for i, _ in PAIRS], axis=1)

        tiles.each_strip(self.t, jnp.bool_(True), cut)

    def take_keys(self, k: Any) -> None:
        axis = 0 if self.t.columns else 1
        for tokens in tiles.steps(self.t.keys, LANES):
            at = (slice(None), tokens) if self.t.columns else (tokens, slice(None))
            self.keys[at] = jnp.concatenate(cut_parts(k[at]), axis=axis)

    def first_chunks(self) -> list[slice]:
        """All but the last, of the six times channels."""
        return self.chunks()[:-1]

    def chunks(self) -> list[slice]:
        """Of the six times channels; the last so short that the matrix units hold it for a whole part."""
        wide = self.queries.shape[2]
        last = LANES * -(-max(wide - _CHUNK // 2, 0) // LANES)
        return [*tiles.steps(last, _CHUNK), slice(last, wide)]

    def product(self, heads: Any, rows: slice, part: Any, keys: slice, chunk: slice) -> Float[Array, "G N S"]:
        """Of the channels of a chunk, for some rows of some heads and some keys of a part, a number or a traced one."""
        dim = self.t.shape[4]
        at: Any = slice(part * self.t.part + keys.start, part * self.t.part + keys.stop)
        if not isinstance(part, int):
            first = pl.multiple_of(part * jnp.int32(self.t.part), self.t.part) + jnp.int32(keys.start)
            at = pl.ds(pl.multiple_of(first, LANES), keys.stop - keys.start)
        pieces = []
        for pair, (_, j) in enumerate(PAIRS):
            start, stop = max(chunk.start - pair * dim, 0), min(chunk.stop - pair * dim, dim)
            if start < stop:
                channels = slice(j * dim + start, j * dim + stop)
                pieces.append(self.keys[channels, at] if self.t.columns else self.keys[at, channels])
        axis = 0 if self.t.columns else 1
        queries = self.queries[heads, rows, chunk]
        found = dot(queries.reshape(-1, queries.shape[2]), jnp.concatenate(pieces, axis=axis), axis)
        return found.reshape(*queries.shape[:2], -1)


@dataclasses.dataclass(frozen=True)
class Products(Parts):
    """Scores from them.

    Attributes:
      score: [parts, G, N, part], what the first chunks sum to.
    """

    score: Any

    def add(self, heads: Any, rows: slice, part: Any, chunk: slice) -> None:
        """What one of the first chunks adds to the scores of some heads' rows.

        For as many keys at once as a matrix unit is wide.
        """
        for keys in tiles.steps(self.t.part, tiles.matrix_unit()):
            found = self.product(heads, rows, part, keys, chunk)
            if chunk.start:
                found += self.score[part, heads, rows, keys]
            self.score[part, heads, rows, keys] = found

    def last(self, heads: Any, rows: slice, part: Any) -> Float[Array, "G N S"]:
        """Scores of a part, all chunks summed."""
        *others, chunk = self.chunks()
        found = self.product(heads, rows, part, slice(0, self.t.part), chunk)
        return found + self.score[part, heads, rows] if others else found
