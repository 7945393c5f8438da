"""The kernel body that each TPU core runs; ``tpu.py`` calls it and checks what it can do.

The loop over blocks is software-pipelined in three stages: scores, softmax, values. An iteration works on three blocks
at once, so that the latencies of one (matrix unit 190 cycles, maximum over lanes 140) are hidden by the others. In the
compiler's schedule an iteration of 512 slots takes 331 cycles on v6e, and 680 without the pipeline (8 queries per head,
D = 128, bfloat16; libtpu 0.0.42).

A block of 2,048 slots keeps a TPU7x's matrix units busy for 384 cycles, and an iteration waits for its last product for
about 250 more, beside the 540 in which memory delivers the block. So there an iteration has two blocks, of one head or
of two: 1,051 cycles where two iterations took 1,278 (libtpu 0.0.50). Four would take 1,907 for four blocks, but need
twice the buffers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.ragged_decode.worklist import FIRST, ZERO
from pallas_kernels.softmax import NEG
from pallas_kernels.tpu.bfloat16_parts import PARTS, dot, product, stacked_parts

LANES = 128
#: Pipeline stages: blocks in use at once, whose buffers cannot be refilled.
STAGES = 3
#: Buffers of returned scores: written in one iteration, copied out from the next on, and free two iterations later.
LOGITS_BUFFERS = 4


@dataclasses.dataclass(frozen=True)
class Static:
    """Static parameters of the kernel.

    Attributes:
      page_size: slots of a page. pages: pages of a block. row_pages: pages of a batch row. heads: heads of a batch row.
      buffers: blocks in the ring, a power of two. cores: cores among which the work list is divided.
      stacked: whether keys and values are separate rows of a page; else they are lanes of the same row.
      tile: slots and lanes of float32 pages that are multiplied at a time; None for other pages, which are multiplied
        in bfloat16 as they are.
      queries: queries of an iteration. strips: iterations for all queries of a head, a power of two.
      in_memory: whether iterations pass the softmax's state on in VMEM; else in registers.
      together: blocks of an iteration, a power of two; more than one wait for the next stage in VMEM.
      by_page: copy page by page, for the interpreter, which has no copies of a size known only at run time.
    """

    page_size: int
    pages: int
    row_pages: int
    heads: int
    buffers: int
    cores: int
    stacked: bool
    tile: tuple[int, int] | None
    queries: int
    strips: int
    in_memory: bool
    together: int
    scale: float
    soft_cap: float | None
    window: int | None
    logits_scale: float | None
    by_page: bool

    @property
    def rows(self) -> int:
        return self.page_size * self.pages

    @property
    def waiting(self) -> bool:
        """Whether a block's scores and weights wait for the next stage in VMEM; else in registers."""
        return self.together > 1

    @property
    def parts(self) -> int:
        return 1 if self.tile is None else PARTS


@dataclasses.dataclass
class Refs:
    """Operands, results and scratch buffers by name; ``None`` for those that this variant does not have.

    Scalars: count [1] and the work list [W]; first_row [1]; log_mass [S]; query_position [B].
    Vector memory: q [S, G, E], of float32 pages its parts [S, 3G, E]; slopes [H, G, 128]; out [S, G, E]; lse [S, 128],
      query g in lane g. Where queries are in strips, S and H count strips of G.
    Device memory: kv [B P, 2, R, E] or [B P, R, E]; v_scale, position [B, P, R]; logits [B P, G, R].
    Scratch: kv_ring, v_scale_ring and position_ring with semaphores arrived [3, N]; logits_ring with left [4];
      zeros [G, 128]; by strip, of this block and the one before, softmax [2 strips, 2, G, 128] (peak, mass) and
      sums [2 strips, 4, G, E] (sum of values; decay, peak, mass). Of several blocks of an iteration, scores [K, G, N]
      and weights [K, G, N].
    """

    count: Any
    segment: Any
    page: Any
    low: Any
    high: Any
    flags: Any
    q: Any
    kv: Any
    out: Any
    lse: Any
    kv_ring: Any
    arrived: Any
    zeros: Any
    softmax: Any = None
    sums: Any = None
    scores: Any = None
    weights: Any = None
    first_row: Any = None
    log_mass: Any = None
    query_position: Any = None
    slopes: Any = None
    v_scale: Any = None
    position: Any = None
    logits: Any = None
    v_scale_ring: Any = None
    position_ring: Any = None
    logits_ring: Any = None
    left: Any = None


def kernel(*operands: Any, names: tuple[str, ...], static: Static) -> None:
    """Body for ``pallas_call``: ``names`` maps the operands to fields of :class:`Refs`; "" for none."""
    _Program(Refs(**{name: ref for name, ref in zip(names, operands, strict=True) if name}), static).run()


@dataclasses.dataclass
class _PageCopy:
    """Copy of some of a block's pages, their number known only at run time."""

    source: Callable[[Any, Any], Any]
    target: Callable[[Any, Any], Any]
    semaphore: Any
    first: Array
    pages: Array
    by_page: bool

    def _copy(self, first: Array, pages: Any) -> Any:
        return pltpu.make_async_copy(self.source(first, pages), self.target(first, pages), self.semaphore)

    def _each(self, act: Callable[[Any], None]) -> None:
        if not self.by_page:
            return act(self._copy(self.first, self.pages))

        def one(i: Array, _: None) -> None:
            act(self._copy(self.first + i, 1))

        lax.fori_loop(jnp.int32(0), self.pages, one, None)

    def start(self) -> None:
        self._each(lambda copy: copy.start())

    def wait(self) -> None:
        self._each(lambda copy: copy.wait())


@dataclasses.dataclass
class _Item:
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


@dataclasses.dataclass
class _Program:
    r: Refs
    s: Static
    begin: Any = None  # This core's first item.

    def run(self) -> None:
        r, s = self.r, self.s
        r.out[...] = jnp.zeros_like(r.out)
        r.lse[...] = jnp.full_like(r.lse, jnp.float32(NEG))
        r.zeros[...] = jnp.zeros_like(r.zeros)
        per_core = lax.div(r.count[0] + jnp.int32(s.cores - 1), jnp.int32(s.cores))
        begin = self.begin = pl.program_id(0) * per_core
        end = jnp.minimum(begin + per_core, r.count[0])
        ahead = s.buffers - STAGES * s.together
        lax.fori_loop(begin, begin + jnp.int32(s.buffers), lambda w, _: self._clear(w, end), None)
        lax.fori_loop(begin, begin + jnp.int32(ahead), lambda w, _: self._start(w, end), None)

        strips = jnp.int32(s.strips)

        def copies(w: Array) -> None:
            self._start(w + jnp.int32(ahead), end)
            self._wait(w, end)
            if r.logits is not None:
                self._send(w, begin, end)

        def iteration(t: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            if s.strips == 1:
                for number in self._numbers(t, begin):
                    copies(number)
            else:
                pl.when((t & (strips - 1)) == 0)(lambda: copies(self._block(t)))
            newest, middle, oldest = (self._items(t, stage, begin, end) for stage in range(STAGES))
            scores, weights, *state = (None, None, *carry) if s.waiting else carry
            # Of each block decay, peak and mass, and the sum of values; nothing where they are in memory.
            passed: list[Array] = state[:-1]
            acc: Any = state[-1] if state else None
            for i, item in enumerate(oldest):
                acc = self._values(item, weights, *passed[3 * i : 3 * i + 3], *([acc] if state else ()))
            state = passed[-2:]
            passed = []
            for item in middle:
                peak, mass, decay, weights = self._softmax(item, scores, *state)
                passed += [decay, peak, mass]
                state = state and [peak, mass]
            for item in newest:
                scores = self._scores(item)
            waiting: tuple[Any, ...] = () if s.waiting else (scores, weights)
            return *waiting, *((*passed, acc) if state else ())

        group, lanes = r.zeros.shape[0], r.q.shape[2]
        # Loaded from memory: a constant would have a replicated layout, which the loop cannot carry as a vector.
        zeros = r.zeros[...]
        scores = jnp.full((group, s.rows), jnp.float32(NEG))
        weights, acc = jnp.zeros((r.q.shape[1], s.rows), jnp.bfloat16), jnp.zeros((group, lanes), jnp.float32)
        waiting = () if s.waiting else (scores, weights)
        for i in range(s.together if s.waiting else 0):
            r.scores[i], r.weights[i] = scores, weights
        state = () if s.in_memory else (*(zeros, zeros + jnp.float32(NEG), zeros) * s.together, acc)
        last = jnp.where(begin < end, self._iterations(begin, end) + jnp.int32(STAGES - 1), begin * strips)
        lax.fori_loop(begin * strips, last, iteration, (*waiting, *state))
        if r.logits is not None:
            for number in self._numbers(last - jnp.int32(STAGES), begin):
                pl.when((begin < end) & (number < end))(lambda w=number: self._logits_copy(w).wait())

    def _numbers(self, t: Array, begin: Array) -> list[Array]:
        """The list's items that an iteration begins with; the list may end before."""
        if self.s.together == 1:
            return [t]
        first = begin + (t - begin) * jnp.int32(self.s.together)
        return [first + jnp.int32(i) for i in range(self.s.together)]

    def _items(self, t: Array, stage: int, begin: Array, end: Array) -> list[_Item]:
        """What a stage of an iteration works on; stage 0 on the newest.

        The first two iterations have nothing for the last stage, and the last two nothing for the first. They use the
        list's first or last block instead, and their results are overwritten or not used.
        """
        strips, back = jnp.int32(self.s.strips), jnp.int32(stage * self.s.together)
        items = []
        for place, newest in enumerate(self._numbers(t, begin)):
            number = newest - back
            past = number >= end if self.s.waiting else None
            items.append(_Item(jnp.clip(number, begin * strips, end * strips - 1), number, place, past))
        return items

    def _iterations(self, begin: Array, end: Array) -> Array:
        """The iteration after the last that has a new block."""
        if self.s.together == 1:
            return end * jnp.int32(self.s.strips)
        count = end - begin + jnp.int32(self.s.together - 1)
        return begin + lax.shift_right_logical(count, jnp.int32(self.s.together.bit_length() - 1))

    # Copies.

    def _slot(self, w: Array) -> Array:
        return w & jnp.int32(self.s.buffers - 1)

    def _live(self, w: Array) -> Array:
        """Pages of an item's block up to the last one with slots of its segment."""
        return self._pages(self.r.high[w] + jnp.int32(self.s.page_size - 1))

    def _pages(self, slots: Array) -> Array:
        """Whole pages in ``slots``, by a shift: a signed division takes ten instructions."""
        return lax.shift_right_logical(slots, jnp.int32(self.s.page_size.bit_length() - 1))

    def _first_row(self) -> Array:
        """Row of the pages that the queries' row 0 belongs to."""
        return jnp.int32(0) if self.r.first_row is None else self.r.first_row[0]

    def _copies(self, w: Array) -> list[Any]:
        r, s, slot, page = self.r, self.s, self._slot(w), self.r.page[w]
        copies: list[Any] = [
            _PageCopy(
                source=lambda first, pages: r.kv.at[pl.ds(page + first, pages)],
                target=lambda first, pages: r.kv_ring.at[slot, pl.ds(first, pages)],
                semaphore=r.arrived.at[jnp.int32(0), slot],
                first=jnp.int32(0),
                pages=self._live(w),
                by_page=s.by_page,
            )
        ]
        for i, (stream, ring) in enumerate(((r.v_scale, r.v_scale_ring), (r.position, r.position_ring)), start=1):
            if stream is not None:
                row = lax.div(r.segment[w], jnp.int32(s.heads)) + self._first_row()
                source = stream.at[row, pl.ds(page - row * jnp.int32(s.row_pages), s.pages)]
                copies.append(pltpu.make_async_copy(source, ring.at[slot], r.arrived.at[jnp.int32(i), slot]))
        return copies

    def _start(self, w: Array, end: Array) -> None:
        @pl.when(w < end)
        def _() -> None:
            for copy in self._copies(w):
                copy.start()

    def _wait(self, w: Array, end: Array) -> None:
        @pl.when(w < end)
        def _() -> None:
            for copy in self._copies(w):
                copy.wait()

    def _clear(self, w: Array, end: Array) -> None:
        """Clear a buffer whose first block does not fill it: 0 times uninitialised memory may be NaN."""

        @pl.when((w < end) & (self._live(jnp.minimum(w, self.r.high.shape[0] - 1)) < jnp.int32(self.s.pages)))
        def _() -> None:
            ring = self.r.kv_ring.at[self._slot(w)]
            ring[...] = jnp.zeros_like(ring)

    # Stages; each works on an item t of an iteration: a block and, where there are several, a strip of queries.

    def _block(self, t: Array) -> Array:
        return t if self.s.strips == 1 else lax.shift_right_logical(t, jnp.int32(self.s.strips.bit_length() - 1))

    def _strip(self, t: Array) -> Array:
        return t & jnp.int32(self.s.strips - 1)

    def _of_strip(self, head: Array, t: Array) -> Array:
        """Index of a head's queries of this iteration, in arrays by head and strip."""
        return head if self.s.strips == 1 else head * jnp.int32(self.s.strips) + self._strip(t)

    def _slots(self, t: Array) -> tuple[Array, Array]:
        """Slots of the state buffers for an item and for the block before it."""
        odd, strip = self._block(t) & jnp.int32(1), self._strip(t) * jnp.int32(2)
        return strip + odd, strip + (odd ^ jnp.int32(1))

    def _before(self, ref: Any, t: Array, kind: int, added: Array) -> Array:
        """State that the block before stored.

        The compiler would load it when the iteration begins, and hold or spill it until it is needed. A store of
        ``added`` to the same buffer, which may alias as far as the compiler can tell, delays the load.
        """
        now, before = self._slots(t)
        if self.s.parts > 1:
            ref[now, kind, :, : added.shape[1]] = added
        return ref[before, kind, :, : added.shape[1]]

    def _first(self, item: _Item) -> Array:
        """Whether the item is its segment's first on this core; another core may have the ones before."""
        w = self._block(item.t)
        first = (self.r.flags[w] & jnp.int32(FIRST)) != 0
        first = first if self.s.cores == 1 else first | (w == self.begin)
        return first if item.past is None else first & ~item.past

    def _row(self, ring: Any, w: Array) -> Array:
        """A stream's numbers for a block, [1, rows]."""
        slot = self._slot(w)
        return jnp.concatenate([ring[slot, pl.ds(i, 1), :] for i in range(self.s.pages)], axis=1)

    def _product(self, a: Array, w: Array, half: int) -> Array:
        """Product with a block's keys (half 0), over lanes, or its values (1), over slots; ``Lanes`` rows hold both."""
        s, slot, lanes = self.s, self._slot(w), self.r.kv_ring.shape[-1]
        halves = (half,) if s.stacked else ()
        if s.tile is None:
            x = self.r.kv_ring[(slot, slice(None), *halves)]
            return dot(a, x.reshape(s.rows, lanes).astype(jnp.bfloat16), 1 - half)

        def load(row: int, rows: int, lane: int, width: int) -> Array:
            pages = pl.ds(row // s.page_size, max(rows // s.page_size, 1))
            slots = pl.ds(row % s.page_size, min(rows, s.page_size))
            return self.r.kv_ring[(slot, pages, *halves, slots, pl.ds(lane, width))].reshape(rows, width)

        return product(a, (s.rows, lanes), load, s.tile, 1 - half)

    def _scores(self, item: _Item) -> Array:
        """Scores [G, rows], NEG where masked; by selection, so that NaN keys past the length have no effect."""
        r, s, t = self.r, self.s, item.t
        w = self._block(t)
        segment, low = r.segment[w], r.low[w]
        raw = self._product(r.q[self._of_strip(segment, t)], w, 0)
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
                slope = r.slopes[self._of_strip(segment - row * jnp.int32(s.heads), t)][:, :1]
                bias = slope * distance.astype(jnp.float32)
        if r.log_mass is not None:
            zero = (r.flags[w] & jnp.int32(ZERO)) != 0
            mass = jnp.where(zero, r.log_mass[segment], jnp.float32(0))
            mass = jnp.where(column == low, mass, jnp.float32(0))
            bias = mass if bias is None else bias + mass

        def scored(scale: float) -> Array:
            x = raw * jnp.float32(scale)
            if s.soft_cap is not None:
                x = jnp.float32(s.soft_cap) * jnp.tanh(x * jnp.float32(1 / s.soft_cap))
            x = x if bias is None else x + bias
            return jnp.where(visible, x, jnp.float32(NEG))

        scores = scored(s.scale)
        if r.logits is not None:
            logits = scores if s.logits_scale is None else scored(s.logits_scale)
            for i in range(s.pages):
                columns = logits[: r.logits_ring.shape[2], i * s.page_size : (i + 1) * s.page_size]
                r.logits_ring[self._logits_slot(item.number), i] = columns
        if s.waiting:
            r.scores[item.place] = scores
        return scores

    def _softmax(self, item: _Item, scores: Any, *state: Array) -> tuple[Array, Array, Array, Array]:
        """Peak and mass with this block, the decay of the earlier mass, and the block's weights.

        The mass is kept per lane; the sum over lanes is taken when a result is written, off this stage's critical path.
        """
        r, s, t = self.r, self.s, item.t
        w = self._block(t)
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
            now, _ = self._slots(t)
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

    def _values(self, item: _Item, weights: Any, *state: Array) -> Array:
        """Sum of values with this block; also written as the segment's result, which its next block overwrites."""
        r, s, t = self.r, self.s, item.t
        w = self._block(t)
        segment = self._of_strip(r.segment[w], t)
        added = self._product(r.weights[item.place] if s.waiting else weights, w, 1)
        if s.in_memory:
            acc, now = self._before(r.sums, t, 0, added), self._slots(t)[0]
            decay, peak, mass = (r.sums[now, i, :, :LANES] for i in range(1, 4))
        else:
            decay, peak, mass, acc = state
        # By selection: before the list's first block the sum may be NaN.
        acc = jnp.where(self._first(item), added, decay[:, :1] * acc + added)
        if s.in_memory:
            r.sums[self._slots(t)[0], 0] = acc
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

    # Returned scores.

    def _logits_slot(self, w: Array) -> Array:
        return w & jnp.int32(LOGITS_BUFFERS * self.s.together - 1)

    def _logits_copy(self, w: Array) -> _PageCopy:
        """Copy of an item's scores to its own pages of the result."""
        r, slot = self.r, self._logits_slot(w)
        page, first = r.page[w] - self._first_row() * jnp.int32(self.s.row_pages), self._pages(r.low[w])
        return _PageCopy(
            source=lambda first, pages: r.logits_ring.at[slot, pl.ds(first, pages)],
            target=lambda first, pages: r.logits.at[pl.ds(page + first, pages)],
            semaphore=r.left.at[slot],
            first=first,
            pages=self._live(w) - first,
            by_page=self.s.by_page,
        )

    def _send(self, number: Array, begin: Array, end: Array) -> None:
        """Copy out the scores of the iteration before; a copy between the stages would keep them from overlapping."""
        written, gone = (number - jnp.int32(i * self.s.together) for i in (1, LOGITS_BUFFERS - 1))
        pl.when((written >= begin) & (written < end))(lambda: self._logits_copy(written).start())
        pl.when(gone >= begin)(lambda: self._logits_copy(gone).wait())
