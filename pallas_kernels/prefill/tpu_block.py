"""A block of the TPU's prefill kernel: its scores in VMEM, their weights, and the weighted values.

A block of scores is 16 times the registers. It is written to VMEM as it leaves the matrix units, in parts of 512 keys,
and read again for the weights. No part loads what the one before stored: the compiler would keep it in registers.

For matrix units of 256 x 256, weights are computed in the order in which the units read them, and a few rows wait for
those before the last. Otherwise the compiler subtracts the peaks from all scores long before it takes the powers, of
which it issues one register per cycle, and spills the differences. Where one part is the whole block there is no next
product to overlap with, and fewer rows are weighted together instead. In compiled schedules the order costs 3 % or
less, on tpu7x 9 to 15 % for 256 channels; fewer rows cost 3 to 25 %, the most against 128 keys.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.softmax import LOG2E, NEG, NOTHING
from pallas_kernels.tpu import tiles
from pallas_kernels.tpu.tiles import LANES, Tiles


@dataclasses.dataclass(frozen=True)
class Order:
    """The order in which weights are computed.

    Attributes:
      parts: parts computed together. keys: keys of each before the next keys are begun. rows: rows at once.
      follow: whether rows wait for those before the last, so that few differences wait in registers for their powers.
      early: leading parts whose sums are rescaled together with the peaks; later, they would wait in registers.
    """

    parts: int
    keys: int
    rows: int
    follow: bool
    early: int

    @classmethod
    def of(cls, t: Tiles, float32: bool) -> Order:
        """The order in which the chip's matrix units read weights; small units leave registers enough for any order."""
        if float32 or t.parts == 1 or tiles.matrix_unit() < 256:
            return cls(1, t.part, t.rows, False, 1 if t.columns and not float32 else 0)
        # Strips of equal size where possible, and more than one.
        rows = next((x for x in (64, 48, 32) if t.rows > x and t.rows % x == 0), min(64, t.rows // 32 * 32 or t.rows))
        if t.shape[4] > LANES and tiles.sums_in_unit():
            # Each unit takes a part of its own: all rows for as many keys as it holds, then for the next keys.
            return cls(2, min(256, t.part), rows, True, 0)
        return cls(1, t.part, rows, True, t.parts // 2)

    def sums_at(self, t: Tiles) -> list[int]:
        """Lane offsets of the sums of a part's weights: after its scores, 128 lanes for each step of ``keys``."""
        return [t.part + i * LANES for i in range(-(-t.part // self.keys))]


def strips(t: Tiles) -> list[slice]:
    """Rows that are weighted together: so few that what is computed early fits the registers."""
    wide = t.shape[4] > LANES
    if tiles.matrix_unit() < 256:
        rows = 512 if wide and t.part > 256 else t.rows
    elif wide or t.part < 256:
        rows = 512
    else:
        rows = 1024 if t.parts == 1 and tiles.sums_in_unit() else t.rows
    return tiles.steps(t.rows, rows)


@dataclasses.dataclass(frozen=True)
class Block:
    """State of a block of queries, in VMEM.

    Attributes:
      bases: two scalars that are 0, unknown to the compiler. They order memory accesses: a load through one base stays
        after a store through the other, while stores and loads through the same base may be reordered.
      score: [parts, rows, part + ...], a part's scores, followed by the sums of its weights in 128 lanes.
      found_peak: [parts, rows, 128], the largest scores of a part. peak: [rows, 128], so far, the same in every lane.
      shrink: factor that rescales earlier sums to the new peak. mass: sum of weights without the last block's.
      total: [parts or sums, rows, D], weighted values; each part has a sum of its own, added up in the last block.
    """

    t: Tiles
    order: Order
    bases: Any
    score: Any
    found_peak: Any
    peak: Any
    shrink: Any
    mass: Any
    total: Any

    def clear(self) -> None:
        """Start a running softmax over no keys."""
        self.peak[...] = jnp.full_like(self.peak, jnp.float32(NEG))
        self.mass[...] = jnp.zeros_like(self.mass)
        for part in range(self.t.parts):
            for at in self.order.sums_at(self.t):
                self.score[part, :, at : at + LANES] = jnp.zeros_like(self.mass)
        for part in range(self.total.shape[0]):
            self.total[part] = jnp.zeros_like(self.total[part])

    def take(self, part: int, scores: Float[Array, "R S"], rows: Any = slice(None)) -> None:
        """Store a part's scores, all or those of some rows, and the largest of them in each lane."""
        self.score[part, rows, : self.t.part] = scores
        self.found_peak[part, rows] = functools.reduce(jnp.maximum, tiles.lanes(scores))

    def lift(self, rows: slice) -> None:
        """Raise the peaks to the scores just taken, and rescale the earlier sums to them."""
        top = functools.reduce(jnp.maximum, [self.found_peak[part, rows] for part in range(self.t.parts)])
        higher = jnp.maximum(self.peak[rows], top.max(axis=1, keepdims=True))
        self.shrink[rows] = jnp.exp2(self.peak[rows] - higher)
        self.mass[rows] = self._whole_mass(rows) * self.shrink[rows]
        for part in range(self.order.early):
            lower = tiles.across(self.shrink[rows], self.total.shape[2])
            self.total[part, rows] = self.total[part, rows] * lower
        self.peak[rows] = higher

    def weights_of(self, part: int, rows: Any, keys: slice, step: int = 0) -> list[Array]:
        """Weights of some keys of a part; ``step`` numbers the calls in the order that they must keep."""
        stored = self.score[self.bases[(step + 1) % 2] + part, rows, keys]
        weights = [jnp.exp2(scores - self.peak[rows]) for scores in tiles.lanes(stored)]
        at = self.t.part + keys.start // self.order.keys * LANES
        self.score[self.bases[step % 2] + part, rows, at : at + LANES] = functools.reduce(jnp.add, weights)
        return weights

    def gather(self, v: Any, rows: slice) -> None:
        """Compute the weights of some rows and add the weighted values."""
        t, order = self.t, self.order
        steps = -(-(rows.stop - rows.start) // order.rows) * -(-t.part // order.keys)
        for first in range(0, t.parts, order.parts):
            parts = range(first, min(first + order.parts, t.parts))
            for part, weight in zip(parts, self._weights(parts, rows, first * steps, v.dtype), strict=True):
                weighed = tiles.dot(weight, t.keys_of(v, part), 1 if t.columns else 0)
                so_far = self.total[part, rows]
                if part >= order.early:
                    so_far *= tiles.across(self.shrink[rows], self.total.shape[2])
                self.total[part, rows] = so_far + weighed

    def finish(self, out: Any, head: Array, queries: Any, rows: Any) -> None:
        """Write the output of some rows of a head, and their log-sum-exp in the place of ``shrink``."""
        attends = self.peak[rows] > jnp.float32(NOTHING)
        # Infinite for a query that attends to nothing: its weights are of masked keys.
        every = jnp.where(attends, self._whole_mass(rows), jnp.float32(jnp.inf))
        every = jnp.maximum(every.sum(axis=1, keepdims=True), jnp.float32(1e-37))
        out[head, queries] = (self.total[:, rows].sum(axis=0) / every).astype(out.dtype)
        found = self.peak[rows] * jnp.float32(1 / LOG2E) + jnp.log(every)
        self.shrink[rows] = jnp.where(attends, found, jnp.float32(NEG))

    def _whole_mass(self, rows: Any) -> Array:
        places = itertools.product(range(self.t.parts), self.order.sums_at(self.t))
        found = [self.score[part, rows, at : at + LANES] for part, at in places]
        return functools.reduce(jnp.add, found, self.mass[rows])

    def _weights(self, parts: range, rows: slice, step: int, dtype: Any) -> list[Array]:
        """Weights of these parts, computed in the order in which the matrix units read them."""
        strips = tiles.steps(rows.stop - rows.start, self.order.rows)
        keys = tiles.steps(self.t.part, self.order.keys)
        made = {}
        for at in itertools.product(range(len(keys)), range(len(strips)), parts):
            i, j, part = at
            strip = slice(rows.start + strips[j].start, rows.start + strips[j].stop)
            found = self.weights_of(part, strip, keys[i], step + len(made))
            made[at] = jnp.concatenate([x.astype(dtype) for x in found], axis=1)

        def whole(part: int, i: int) -> Array:
            return jnp.concatenate([made[i, j, part] for j in range(len(strips))])

        return [jnp.concatenate([whole(part, i) for i in range(len(keys))], axis=1) for part in parts]
