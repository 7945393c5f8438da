"""A block of queries in the TPU's prefill: scores in memory, and what their weights come to.

A block of scores is 16 times the registers. It is written to memory as it leaves the product, in parts of 512 keys, and
read again for the weights. Nothing that one part stores is loaded by the next: the compiler would keep it in registers.

For units of 256 x 256 weights are made in the order in which these take them, a few rows waiting for the ones before
the last: else peaks are subtracted from scores long before the powers are raised, one register a cycle. Where one part
is all of a block there is no next product to overlap with, and fewer rows are weighed together instead. Scheduled, the
order costs 3 % or less, on tpu7x 9 to 15 % for 256 channels; fewer rows 3 to 25 %, most against 128 keys.
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
    """In which weights are made, one kind after the other.

    Attributes:
      parts: made together. keys: of these parts, before their next. rows: at once.
      follow: whether rows wait for those before the last, so that few numbers wait in registers for their powers.
      early: parts whose sums are lifted with the peaks: those of the first would wait in registers for late products.
    """

    parts: int
    keys: int
    rows: int
    follow: bool
    early: int

    @classmethod
    def of(cls, t: Tiles, float32: bool) -> Order:
        """As the chip's matrix units take the weights; of small units, which leave registers enough, as they come."""
        if float32 or t.parts == 1 or tiles.matrix_unit() < 256:
            return cls(1, t.part, t.rows, False, 1 if t.columns and not float32 else 0)
        # All alike where that is possible, and not all at once.
        rows = next((x for x in (64, 48, 32) if t.rows > x and t.rows % x == 0), min(64, t.rows // 32 * 32 or t.rows))
        if t.shape[4] > LANES and tiles.sums_in_unit():
            # Each unit takes a part of its own, all rows of as many keys as it holds and then of the next.
            return cls(2, min(256, t.part), rows, True, 0)
        return cls(1, t.part, rows, True, t.parts // 2)

    def sums_at(self, t: Tiles) -> list[int]:
        """Where the sums of a part's weights lie: behind its scores, 128 lanes for as many keys as are made at once."""
        return [t.part + i * LANES for i in range(-(-t.part // self.keys))]


def strips(t: Tiles) -> list[slice]:
    """Rows that are weighed together: so few that what is made early fits the registers."""
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
    """Of a block's queries, in memory.

    Attributes:
      bases: two numbers that are 0, which the compiler does not know: what is stored from one it does not load from the
        other before, and what is stored from the same it may.
      score: [parts, rows, part + ...], and behind a part's scores the sums of its weights, in 128 lanes.
      found_peak: [parts, rows, 128], the largest scores of a part. peak: [rows, 128], so far, the same in every lane.
      shrink: what is gathered before them is to be lowered by. mass: the sum of weights but for the last block's.
      total: [parts or sums, rows, D], what was weighed; each part has sums of its own, which meet in the last block.
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
        self.peak[...] = jnp.full_like(self.peak, jnp.float32(NEG))
        self.mass[...] = jnp.zeros_like(self.mass)
        for part in range(self.t.parts):
            for at in self.order.sums_at(self.t):
                self.score[part, :, at : at + LANES] = jnp.zeros_like(self.mass)
        for part in range(self.total.shape[0]):
            self.total[part] = jnp.zeros_like(self.total[part])

    def take(self, part: int, scores: Float[Array, "R S"]) -> None:
        self.score[part, :, : self.t.part] = scores
        self.found_peak[part] = functools.reduce(jnp.maximum, tiles.lanes(scores))

    def lift(self, rows: slice) -> None:
        """The peaks, and what was gathered before, with those that were found."""
        top = functools.reduce(jnp.maximum, [self.found_peak[part, rows] for part in range(self.t.parts)])
        higher = jnp.maximum(self.peak[rows], top.max(axis=1, keepdims=True))
        self.shrink[rows] = jnp.exp2(self.peak[rows] - higher)
        self.mass[rows] = self._whole_mass(rows) * self.shrink[rows]
        for part in range(self.order.early):
            lower = tiles.across(self.shrink[rows], self.total.shape[2])
            self.total[part, rows] = self.total[part, rows] * lower
        self.peak[rows] = higher

    def weights_of(self, part: int, rows: Any, keys: slice, turn: int = 0) -> list[Array]:
        """Of some keys of a part; ``turn`` numbers what must follow what."""
        there = self.score[self.bases[(turn + 1) % 2] + part, rows, keys]
        weights = [jnp.exp2(scores - self.peak[rows]) for scores in tiles.lanes(there)]
        at = self.t.part + keys.start // self.order.keys * LANES
        self.score[self.bases[turn % 2] + part, rows, at : at + LANES] = functools.reduce(jnp.add, weights)
        return weights

    def gather(self, v: Any, rows: slice) -> None:
        """Weights and what they weigh."""
        t, order = self.t, self.order
        turns = -(-(rows.stop - rows.start) // order.rows) * -(-t.part // order.keys)
        for first in range(0, t.parts, order.parts):
            parts = range(first, min(first + order.parts, t.parts))
            for part, weight in zip(parts, self._weights(parts, rows, first * turns, v.dtype), strict=True):
                weighed = tiles.dot(weight, t.keys_of(v, part), 1 if t.columns else 0)
                so_far = self.total[part, rows]
                if part >= order.early:
                    so_far *= tiles.across(self.shrink[rows], self.total.shape[2])
                self.total[part, rows] = so_far + weighed

    def finish(self, out: Any, head: Array, queries: Any, rows: Any) -> None:
        """What a head's rows come to, and their log-sum-exp, where ``shrink`` was."""
        sees = self.peak[rows] > jnp.float32(NOTHING)
        # Infinite where a query sees nothing, whose weights are of no keys of its own.
        every = jnp.where(sees, self._whole_mass(rows), jnp.float32(jnp.inf))
        every = jnp.maximum(every.sum(axis=1, keepdims=True), jnp.float32(1e-37))
        out[head, queries] = (self.total[:, rows].sum(axis=0) / every).astype(out.dtype)
        found = self.peak[rows] * jnp.float32(1 / LOG2E) + jnp.log(every)
        self.shrink[rows] = jnp.where(sees, found, jnp.float32(NEG))

    def _whole_mass(self, rows: Any) -> Array:
        places = itertools.product(range(self.t.parts), self.order.sums_at(self.t))
        found = [self.score[part, rows, at : at + LANES] for part, at in places]
        return functools.reduce(jnp.add, found, self.mass[rows])

    def _weights(self, parts: range, rows: slice, turn: int, dtype: Any) -> list[Array]:
        """Of these parts, made in the order in which the matrix units take them."""
        strips = tiles.steps(rows.stop - rows.start, self.order.rows)
        keys = tiles.steps(self.t.part, self.order.keys)
        made = {}
        for at in itertools.product(range(len(keys)), range(len(strips)), parts):
            i, j, part = at
            strip = slice(rows.start + strips[j].start, rows.start + strips[j].stop)
            found = self.weights_of(part, strip, keys[i], turn + len(made))
            made[at] = jnp.concatenate([x.astype(dtype) for x in found], axis=1)

        def whole(part: int, i: int) -> Array:
            return jnp.concatenate([made[i, j, part] for j in range(len(strips))])

        return [jnp.concatenate([whole(part, i) for i in range(len(keys))], axis=1) for part in parts]
