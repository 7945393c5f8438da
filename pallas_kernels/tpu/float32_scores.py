"""Scores of float32 queries and keys on TPUs, from three bfloat16 parts of each number.

The six largest products of parts are summed, as for ``Precision.HIGHEST``, for which the compiler keeps a block's parts
and sums in registers, and spills. Here the parts are stored in memory, and a score's six products are one product over
six times the channels, smallest first. It is computed in chunks of as many channels as the matrix units hold; each
chunk adds to the sums that the one before stored.
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

#: Part of the queries and part of the keys that are multiplied, smallest product first.
PAIRS = ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0))
#: Channels contracted at once: as many as all matrix units hold together, so that no sum waits in registers.
_CHUNK = 512


def scratch(t: Tiles) -> list[Any]:
    """Scratch buffers of :class:`Products`."""
    return [*parts_scratch(t), pltpu.VMEM((t.parts, t.shape[2], t.queries, t.part), jnp.float32)]


def parts_scratch(t: Tiles) -> list[Any]:
    """Scratch buffers of :class:`Parts`."""
    _, _, group, _, dim = t.shape
    keys = (PARTS * dim, t.keys) if t.columns else (t.keys, PARTS * dim)
    return [pltpu.VMEM(shape, jnp.bfloat16) for shape in ((group, t.queries, len(PAIRS) * dim), keys)]


def scratch_bytes(shapes: list[Any]) -> int:
    """Total bytes of scratch buffers."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in shapes)


@dataclasses.dataclass(frozen=True)
class Parts:
    """A block's queries and keys in bfloat16 parts, in VMEM.

    Attributes:
      queries: [G, N, 6 D], in the order of ``PAIRS``. keys: [keys, 3 D], or transposed.
    """

    t: Tiles
    queries: Any
    keys: Any

    def take_queries(self, q: Any, factor: Array) -> None:
        """Store the parts of the queries times ``factor``, the softmax's scale.

        In a loop over few rows: putting parts side by side moves them between lanes, which takes registers.
        """

        def cut(head: Array, queries: Any, _: Any) -> None:
            parts = rounded_parts(q[head, queries] * factor)
            self.queries[head, queries] = jnp.concatenate([parts[i] for i, _ in PAIRS], axis=1)

        tiles.each_strip(self.t, jnp.bool_(True), cut)

    def take_keys(self, k: Any) -> None:
        """Store the parts of a block of keys."""
        axis = 0 if self.t.columns else 1
        for tokens in tiles.steps(self.t.keys, LANES):
            at = (slice(None), tokens) if self.t.columns else (tokens, slice(None))
            self.keys[at] = jnp.concatenate(cut_parts(k[at]), axis=axis)

    def first_chunks(self) -> list[slice]:
        """All chunks but the last."""
        return self.chunks()[:-1]

    def chunks(self) -> list[slice]:
        """Slices of the 6 D channels; the last is so short that the matrix units hold it for a whole part of keys."""
        wide = self.queries.shape[2]
        last = LANES * -(-max(wide - _CHUNK // 2, 0) // LANES)
        return [*tiles.steps(last, _CHUNK), slice(last, wide)]

    def product(self, heads: Any, rows: slice, part: Any, keys: slice, chunk: slice) -> Float[Array, "G N S"]:
        """Product over a chunk of channels, of some rows of some heads and some keys of a part; it may be traced."""
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
    """Scores from these parts.

    Attributes:
      score: [parts, G, N, part], the sum of the chunks so far.
    """

    score: Any

    def add(self, heads: Any, rows: slice, part: Any, chunk: slice) -> None:
        """Add one of the first chunks to the stored scores of some rows, a matrix unit's width of keys at a time."""
        for keys in tiles.steps(self.t.part, tiles.matrix_unit()):
            found = self.product(heads, rows, part, keys, chunk)
            if chunk.start:
                found += self.score[part, heads, rows, keys]
            self.score[part, heads, rows, keys] = found

    def last(self, heads: Any, rows: slice, part: Any) -> Float[Array, "G N S"]:
        """Scores of a part, the sum of all chunks."""
        *others, chunk = self.chunks()
        found = self.product(heads, rows, part, slice(0, self.t.part), chunk)
        return found + self.score[part, heads, rows] if others else found
