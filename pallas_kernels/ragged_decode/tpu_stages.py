"""The three stages of the TPU kernel's pipeline: scores, softmax, values.

Each works on an item of an iteration: a block and, where there are several, a strip of queries.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.ragged_decode.tpu_refs import LANES, Refs, Static
from pallas_kernels.ragged_decode.worklist import FIRST, ZERO
from pallas_kernels.softmax import NEG, capped
from pallas_kernels.tpu.bfloat16_parts import dot, product, stacked_parts


@dataclasses.dataclass
class Item:
    """A block, of several strips of queries one of them, at one stage of an iteration.

    Attributes:
      t: its number in the list. number: the same, before it was limited to the list.
      place: which of the iteration's blocks it is. past: whether it is beyond the list and adds nothing to the last
        block's head; None where an iteration has one block, whose results are then not used.
    """

    t: Array
    number: Array
    place: int
    past: Array | None


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a core whose first item is ``begin``."""

    r: Refs
    s: Static
    begin: Array

    def _before(self, ref: Any, t: Array, kind: int, added: Array) -> Array:
        """State that the block before stored.

        The compiler would load it when the iteration begins, and hold or spill it until it is needed. A store of
        ``added`` to the same buffer, which may alias as far as the compiler can tell, delays the load.
        """
        now, before = self.s.state_slots(t)
        if self.s.parts > 1:
            ref[now, kind, :, : added.shape[1]] = added
        return ref[before, kind, :, : added.shape[1]]

    def _first(self, item: Item) -> Array:
        """Whether the item is its segment's first on this core; another core may have the ones before."""
        w = self.s.block(item.t)
        first = (self.r.flags[w] & jnp.int32(FIRST)) != 0
        first = first if self.s.cores == 1 else first | (w == self.begin)
        return first if item.past is None else first & ~item.past

    def _row(self, ring: Any, w: Array) -> Array:
        """A stream's numbers for a block, [1, rows]."""
        slot = self.s.ring_slot(w)
        return jnp.concatenate([ring[slot, pl.ds(i, 1), :] for i in range(self.s.pages)], axis=1)

    def _product(self, a: Array, w: Array, half: int) -> Array:
        """Product with a block's keys (half 0), over lanes, or its values (1), over slots; ``Lanes`` rows hold both."""
        s, slot, lanes = self.s, self.s.ring_slot(w), self.r.kv_ring.shape[-1]
        halves = (half,) if s.stacked else ()
        if s.tile is None:
            x = self.r.kv_ring[(slot, slice(None), *halves)]
            return dot(a, x.reshape(s.rows, lanes).astype(jnp.bfloat16), 1 - half)

        def load(row: int, rows: int, lane: int, width: int) -> Array:
            pages = pl.ds(row // s.page_size, max(rows // s.page_size, 1))
            slots = pl.ds(row % s.page_size, min(rows, s.page_size))
            return self.r.kv_ring[(slot, pages, *halves, slots, pl.ds(lane, width))].reshape(rows, width)

        return product(a, (s.rows, lanes), load, s.tile, 1 - half)

    def scores(self, item: Item) -> Array:
        """Scores [G, rows], NEG where masked; by selection, so that NaN keys past the length have no effect."""
        r, s, t = self.r, self.s, item.t
        w = self.s.block(t)
        segment, low = r.segment[w], r.low[w]
        raw = self._product(r.q[self.s.of_strip(segment, t)], w, 0)
        column = lax.broadcasted_iota(jnp.int32, raw.shape, 1)
        high = r.high[w] if item.past is None else jnp.where(item.past, jnp.int32(0), r.high[w])
        visible = (column >= low) & (column < high)
        bias = None
        if r.position is not None:
            row = lax.div(segment, jnp.int32(s.heads))
            distance = self._row(r.position_ring, w) - r.query_position[row]
            if s.window is not None:
                visible &= distance > jnp.int32(-s.window)
            if r.slopes is not None:
                slope = r.slopes[self.s.of_strip(segment - row * jnp.int32(s.heads), t)][:, :1]
                bias = slope * distance.astype(jnp.float32)
        if r.log_mass is not None:
            zero = (r.flags[w] & jnp.int32(ZERO)) != 0
            mass = jnp.where(zero, r.log_mass[segment], jnp.float32(0))
            mass = jnp.where(column == low, mass, jnp.float32(0))
            bias = mass if bias is None else bias + mass

        def scored(scale: float) -> Array:
            x = capped(raw * jnp.float32(scale), s.soft_cap)
            x = x if bias is None else x + bias
            return jnp.where(visible, x, jnp.float32(NEG))

        scores = scored(s.scale)
        if r.logits is not None:
            logits = scores if s.logits_scale is None else scored(s.logits_scale)
            for i in range(s.pages):
                columns = logits[: r.logits_ring.shape[2], i * s.page_size : (i + 1) * s.page_size]
                r.logits_ring[self.s.logits_slot(item.number), i] = columns
        if s.waiting:
            r.scores[item.place] = scores
        return scores

    def softmax(self, item: Item, scores: Any, *state: Array) -> tuple[Array, Array, Array, Array]:
        """Peak and mass with this block, the decay of the earlier mass, and the block's weights.

        The mass is kept per lane; the sum over lanes is taken when a result is written, off this stage's critical path.
        """
        r, s, t = self.r, self.s, item.t
        w = self.s.block(t)
        first = self._first(item)

        def columns() -> list[Array]:
            """The scores, a register's lanes at a time; those that wait are loaded anew, and not held meanwhile."""
            from_memory = r.scores.at[item.place] if s.waiting else scores
            return [from_memory[:, i : i + LANES] for i in range(0, s.rows, LANES)]

        largest = jnp.max(functools.reduce(jnp.maximum, columns()) if s.waiting else scores, axis=1, keepdims=True)
        if s.in_memory:
            largest = jnp.broadcast_to(largest, r.zeros.shape)
        peak = self._before(r.softmax, t, 0, largest) if s.in_memory else state[0]
        before = jnp.where(first, jnp.float32(NEG), peak)
        peak = jnp.maximum(before, largest)
        decay = jnp.where(first, jnp.float32(0), jnp.exp(before - peak))
        weights = [jnp.exp(x - peak) for x in columns()]
        if r.position is not None and s.window is not None:  # In a block that is all masked, every weight is exp(0).
            weights = [
                jnp.where(x > jnp.float32(NEG), y, jnp.float32(0)) for x, y in zip(columns(), weights, strict=True)
            ]
        total = functools.reduce(jnp.add, weights)
        mass = self._before(r.softmax, t, 1, total) if s.in_memory else state[1]
        mass = jnp.where(first, total, decay * mass + total)
        if s.in_memory:
            now, _ = self.s.state_slots(t)
            for i, x in enumerate((peak, mass)):
                r.softmax[now, i] = x
            for i, x in enumerate((decay, peak, mass)):
                r.sums[now, 1 + i, :, :LANES] = x
        weight = jnp.concatenate(weights, axis=1)
        if r.v_scale is not None:
            weight = weight * self._row(r.v_scale_ring, w)
        weight = weight.astype(jnp.bfloat16) if s.tile is None else stacked_parts(weight)
        if s.waiting:
            r.weights[item.place] = weight
        return peak, mass, decay, weight

    def values(self, item: Item, weights: Any, *state: Array) -> Array:
        """Sum of values with this block; also written as the segment's result, which its next block overwrites."""
        r, s, t = self.r, self.s, item.t
        w = self.s.block(t)
        segment = self.s.of_strip(r.segment[w], t)
        added = self._product(r.weights[item.place] if s.waiting else weights, w, 1)
        if s.in_memory:
            acc, now = self._before(r.sums, t, 0, added), self.s.state_slots(t)[0]
            decay, peak, mass = (r.sums[now, i, :, :LANES] for i in range(1, 4))
        else:
            decay, peak, mass, acc = state
        # By selection: before the list's first block the sum may be NaN.
        acc = jnp.where(self._first(item), added, decay[:, :1] * acc + added)
        if s.in_memory:
            r.sums[self.s.state_slots(t)[0], 0] = acc
        total = jnp.sum(mass, axis=1, keepdims=True)
        lse = peak + jnp.log(total)
        out = acc / total
        if r.position is not None and s.window is not None:
            out = jnp.where(total > 0, out, jnp.float32(0))
            lse = jnp.where(total > 0, lse, jnp.float32(NEG))
        r.out[segment] = out[: r.out.shape[1]].astype(r.out.dtype)
        # Queries along the lanes: a head's log-sum-exps take 128 lanes together, as a column they would take 128 each.
        query = lax.broadcasted_iota(jnp.int32, lse.shape, 0)
        lane = lax.broadcasted_iota(jnp.int32, lse.shape, 1)
        r.lse[pl.ds(segment, 1), :] = jnp.sum(jnp.where(query == lane, lse, jnp.float32(0)), axis=0, keepdims=True)
        return acc
