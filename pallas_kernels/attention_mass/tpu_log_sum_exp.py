"""The first pass on TPUs: the log-sum-exp of every query.

* A block's scores are computed in parts of 512 keys. Each part keeps a running maximum and sum per lane; they are
  merged in the last block.
* Scores are written to VMEM as they leave the matrix units, and read again for their weights one grid step later,
  while that step's products run: scores that wait for exponentials hold no registers that the products need.
* Masks are applied in the first block and in those of which queries see a part.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.attention_mass.mass_problem import Problem
from pallas_kernels.softmax import LOG2E, NEG, NOTHING, capped_log2
from pallas_kernels.tpu import float32_scores, tiles
from pallas_kernels.tpu.tiles import LANES, SUBLANES, Config, Tiles

#: Where products are faster than the work on their scores: rows of queries in a unit, and how many rows of the unit
#: before may still wait for their peaks when a row is multiplied; see ``_held_back``.
_UNIT, _BEHIND = 256, 32
#: Most rows of float32 queries that are multiplied together.
_ROWS = 1024


def tiling(p: Problem, config: Config | None, count: int | None = None) -> Tiles:
    """Blocks of the first ``count`` queries.

    Where the matrix units take several passes over the channels, parts have few keys: partial sums wait in registers.
    """
    unit = tiles.matrix_unit()
    rounds = p.k.dtype == jnp.float32 or p.q.shape[4] > max(LANES, unit)
    return Tiles.of(p.q, p.k, config, 2 * unit if rounds else None, count, p.window)


def _held_back(q: Float[Array, "M D"], gathered: Float[Array, "M 128"], measured: Any) -> Float[Array, "M D"]:
    """Make products of ``q`` depend on earlier work, so that the compiler does not schedule them too early.

    On chips whose products are faster than the work on their scores, products would soon be hundreds of results ahead,
    which spill. So 64 queries at a time wait until their old scores are gathered, whose place the new ones take, and
    until earlier queries have their peaks. The dependency is a zero that the compiler cannot know to be one, added to
    the first of the queries: a sum of weights where it is below 0, else 0.
    """
    found = []
    for rows in tiles.steps(q.shape[0], 64):
        least = gathered[rows.start : rows.start + SUBLANES]
        before = min(rows.start - _BEHIND, (0 if measured is None else measured.shape[0]) - SUBLANES)
        if before >= 0:
            least = jnp.minimum(least, measured[before : before + SUBLANES])
        # Selected, not the minimum with 0, which would carry one query's NaN to another.
        zero = jnp.where(least < 0, least, jnp.float32(0))
        held = min(rows.start + 2 * SUBLANES, rows.stop)
        zeros = tiles.across(jnp.concatenate([zero, zero]).astype(q.dtype), q.shape[1])
        found.append(q[rows.start : held] + zeros)
        if held < rows.stop:
            found.append(q[held : rows.stop])
    return jnp.concatenate(found)


class _Strip(NamedTuple):
    """Rows of a block: all queries of some heads, or some queries of one head."""

    heads: slice
    queries: slice
    rows: slice


def _strips(t: Tiles, most: int) -> list[_Strip]:
    """Split a block's queries into strips of at most ``most`` rows."""
    group = t.shape[2]
    count = t.heads_in(most)
    found = []
    for heads in tiles.steps(group, count):
        for queries in tiles.steps(t.queries, t.queries if count > 1 else most):
            start, rows = heads.start * t.queries + queries.start, count * (queries.stop - queries.start)
            found.append(_Strip(heads, queries, slice(start, start + rows)))
    return found


def _whole(t: Tiles) -> _Strip:
    return _Strip(slice(0, t.shape[2]), slice(0, t.queries), slice(0, t.rows))


@dataclasses.dataclass(frozen=True)
class _Block:
    """State of a block of queries, in VMEM: the last scores, and a running softmax per part and lane.

    Attributes:
      score: [parts, G, N, part], scores against the last block of keys. peak: [parts, rows, 128], the largest so far.
      shrink: factor that rescales earlier sums to the new peak. mass: sum of weights without the last scores'.
    """

    t: Tiles
    score: Any
    peak: Any
    shrink: Any
    mass: Any

    def clear(self) -> None:
        """Start a running softmax over no keys."""
        self.peak[...] = jnp.full_like(self.peak, jnp.float32(NEG))
        self.mass[...] = jnp.zeros_like(self.mass)

    def lift(self, part: int, rows: Any, found: list[Array]) -> Array:
        """Raise the peaks to the largest scores in ``found``; returns the factor that rescales their sums."""
        before = self.peak[part, rows]
        higher = functools.reduce(jnp.maximum, found, before)
        lower = jnp.exp2(before - higher)
        self.shrink[part, rows], self.peak[part, rows] = lower, higher
        return lower

    def lift_rows(self, _: Any, __: Any, rows: Any) -> None:
        """Raise the peaks of every part to its largest scores, which ``shrink`` holds until then."""
        for part in range(self.t.parts):
            self.lift(part, rows, [self.shrink[part, rows]])

    def gather(self, part: int, at: _Strip) -> Array:
        """Add the weights of the last scores to the sum; returns the new sum."""
        scores = tiles.lanes(self.score[part, at.heads, at.queries].reshape(-1, self.t.part))
        weights = [jnp.exp2(x - self.peak[part, at.rows]) for x in scores]
        found = self.mass[part, at.rows] * self.shrink[part, at.rows] + functools.reduce(jnp.add, weights)
        self.mass[part, at.rows] = found
        return found

    def gather_all(self) -> None:
        """:meth:`gather` for all parts and rows."""
        for part in range(self.t.parts):
            self.gather(part, _whole(self.t))

    def meet(self, _: Any, __: Any, rows: Any) -> None:
        """Merge all parts and lanes to the log-sum-exp, stored in the place of the first part's sums."""
        parts = range(self.t.parts)
        higher = functools.reduce(jnp.maximum, [self.peak[part, rows] for part in parts])
        top = jnp.broadcast_to(higher.max(axis=1, keepdims=True), higher.shape)
        lowered = [self.mass[part, rows] * jnp.exp2(self.peak[part, rows] - top) for part in parts]
        total = jnp.maximum(functools.reduce(jnp.add, lowered).sum(axis=1, keepdims=True), jnp.float32(1e-37))
        found = top * jnp.float32(1 / LOG2E) + jnp.log(total)
        self.mass[0, rows] = jnp.where(top > jnp.float32(NOTHING), found, jnp.float32(NEG))


@dataclasses.dataclass(frozen=True)
class _Measure:
    """The scores of a block of queries against a block of keys, and what they do to the queries' softmax.

    Attributes:
      rows: the queries' state. first, first_key: the first query, counted from the first of all, and the first key.
      products: of float32 rows, or None. fast: whether products are faster than the work on their scores.
    """

    rows: _Block
    soft_cap: float | None
    b: Array
    first: Array
    first_key: Array
    offset: Any
    factor: Any
    q: Any
    k: Any
    products: Any
    fast: bool

    def part(self, part: int, at: _Strip, masked: bool, hold_back: Any = None) -> Array | None:
        """Compute and store a part's scores and raise the peaks, which on fast chips ``lift_rows`` does if masked."""
        t, rows = self.rows.t, self.rows
        scores = capped_log2(self._scores(part, at, hold_back), self.soft_cap)
        if masked:
            # Masked weights need no zeros: a lane without a score sums exp2(0), and its first real peak removes it.
            ahead = self.first + jnp.int32(at.queries.start) - self.first_key - jnp.int32(part * t.part)
            heads = range(at.heads.start, at.heads.stop)
            scores = tiles.masked(scores, [self.offset[self.b * t.shape[2] + g] + ahead for g in heads], t.window)
        rows.score[part, at.heads, at.queries] = scores.reshape(-1, at.queries.stop - at.queries.start, t.part)
        if masked and self.fast:
            rows.shrink[part, at.rows] = functools.reduce(jnp.maximum, tiles.lanes(scores))
            return None
        return rows.lift(part, at.rows, tiles.lanes(scores))

    def _scores(self, part: int, at: _Strip, hold_back: Any) -> Array:
        t = self.rows.t
        if self.products:
            return self.products.last(at.heads, at.queries, part).reshape(-1, t.part)
        queries = self.q[at.heads, at.queries]
        if hold_back is not None:
            queries = _held_back(queries.reshape(-1, queries.shape[-1]), *hold_back)[None]
        return tiles.scores(queries, t.keys_of(self.k, part), t.columns) * self.factor[self.b]

    def strip(self, at: _Strip, masked: bool) -> None:
        """:meth:`part` for all parts of a strip."""
        for part in range(self.rows.t.parts):
            self.part(part, at, masked)

    def gather_and_measure(self) -> None:
        """The last block's weights and this block's scores, in turns; not masked."""
        t = self.rows.t
        holds, measured = self.fast and t.rows > LANES, None
        for at in _strips(t, _UNIT if holds else t.rows):
            for part in range(t.parts):
                gathered = self.rows.gather(part, at)
                measured = self.part(part, at, False, (gathered, measured) if holds else None)

    def add(self, chunk: slice) -> None:
        """Add the products of a chunk of the channels."""
        at = _whole(self.rows.t)
        for part in range(self.rows.t.parts):
            self.products.add(at.heads, at.queries, part, chunk)


def _kernel(offset, factor, q, k, out, score, peak, shrink, mass, *float32, t: Tiles, soft_cap):
    b, i, block = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    first = i * jnp.int32(t.queries)
    first_query = offset[b * t.shape[2]] + first
    first_key = (t.first_key_block(first_query) + block) * jnp.int32(t.keys)
    last = block == pl.num_programs(3) - 1
    rows = _Block(t, score, peak, shrink, mass)
    products: Any = float32_scores.Products(t, float32[0], float32[1], score) if float32 else None
    fast = tiles.matrix_unit() > LANES
    measure = _Measure(rows, soft_cap, b, first, first_key, offset, factor, q, k, products, fast)

    @pl.when(block == 0)
    def _():
        rows.clear()
        if products:
            products.take_queries(q, factor[b])

    below = jnp.logical_and(block > 0, t.whole(first_query, first_key))
    live = t.touched(first_query, first_key)
    crossed = jnp.logical_and(live, jnp.logical_not(below))
    strips = _strips(t, _ROWS if products else t.rows)
    if products:
        tiles.scheduling_barrier(jnp.logical_and(live, block > 0), rows.gather_all)
        pl.when(live)(functools.partial(products.take_keys, k))
        for chunk in products.first_chunks():
            tiles.scheduling_barrier(live, functools.partial(measure.add, chunk))
        for at in strips:
            tiles.scheduling_barrier(below, functools.partial(measure.strip, at, masked=False))
    else:
        tiles.scheduling_barrier(below, measure.gather_and_measure)
        tiles.scheduling_barrier(jnp.logical_and(crossed, block > 0), rows.gather_all)
    for at in strips:
        tiles.scheduling_barrier(crossed, functools.partial(measure.strip, at, masked=True))
    if fast:
        tiles.each_strip(t, crossed, rows.lift_rows, 32)
    tiles.scheduling_barrier(last, rows.gather_all)
    tiles.each_strip(t, last, rows.meet, 32)
    pl.when(last)(lambda: tiles.store_by_head(out, mass[0]))


def _memory(t: Tiles, itemsize: int) -> int | None:
    """VMEM limit for scores, peaks, sums and blocks in flight."""
    scratch = 4 * t.rows * (t.keys + 3 * t.parts * LANES)
    if itemsize == 4:
        scratch += float32_scores.scratch_bytes(float32_scores.parts_scratch(t))
    return tiles.vmem_limit(scratch + 2 * itemsize * max(t.shape[4], LANES) * (t.rows + t.keys))


def call(p: Problem, t: Tiles, interpret: Any) -> Float[Array, "B H G N"]:
    """Run the kernel over the queries of ``t``."""
    batch, heads, group, _, dim = t.shape

    def key_block(b, h, i, block, offset, *_):
        return b, h, t.key_block(offset[b * group], i, block)

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(batch, heads, t.query_blocks, t.key_steps(p.offset)),
        in_specs=[
            pl.BlockSpec((None, None, group, t.queries, dim), lambda b, h, i, *_: (b, h, 0, i, 0)),
            t.key_spec(key_block),
        ],
        out_specs=pl.BlockSpec((None, None, group, t.queries), lambda b, h, i, *_: (b, h, 0, i)),
        scratch_shapes=[
            pltpu.VMEM((t.parts, group, t.queries, t.part), jnp.float32),
            *[pltpu.VMEM((t.parts, t.rows, LANES), jnp.float32)] * 3,
            *(float32_scores.parts_scratch(t) if p.k.dtype == jnp.float32 else ()),
        ],
    )
    out = jax.ShapeDtypeStruct(t.shape[:4], jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, t=t, soft_cap=p.soft_cap),
        grid_spec=grid,
        out_shape=out,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=_memory(t, p.k.dtype.itemsize),
        ),
        cost_estimate=t.cost(p.k.dtype.itemsize, 1, 4 * out.size),
        name="log_sum_exp",
        interpret=interpret,
    )(jnp.repeat(p.offset, group), p.scale * jnp.float32(LOG2E), t.query_rows(p.q), t.key_rows(p.k))
