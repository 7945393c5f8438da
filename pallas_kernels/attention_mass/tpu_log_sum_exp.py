"""The first pass on TPUs: the log-sum-exp of every query.

* A block's scores are computed in parts of 512 keys; the running maximum and sum of each, in 128 lanes apart, meet in
  the last block.
* They are written to memory as they leave the product, and read again for the weights a turn later, while that turn's
  products run: what waits for exponentials holds no registers that the products need.
* Masks are compared and selected in the first block and in those that the diagonal crosses.
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
from pallas_kernels.softmax import LOG2E, NEG, NOTHING
from pallas_kernels.tpu import float32_scores, tiles
from pallas_kernels.tpu.tiles import LANES, SUBLANES, Config, Tiles

#: Rows of queries that are measured together where products are faster than what becomes of them, and how many rows of
#: the unit before may not be measured yet when a row is multiplied: see ``_held_back``.
_UNIT, _BEHIND = 256, 32
#: Rows of float32 queries that are multiplied together at most.
_ROWS = 1024


def tiling(p: Problem, config: Config | None, count: int | None = None) -> Tiles:
    """Of the first ``count`` queries.

    In parts of so few keys that what comes out of the matrix units in several rounds is not many registers.
    """
    unit = tiles.matrix_unit()
    rounds = p.k.dtype == jnp.float32 or p.q.shape[4] > max(LANES, unit)
    return Tiles.of(p.q, p.k, config, 2 * unit if rounds else None, count)


def _held_back(q: Float[Array, "M D"], gathered: Float[Array, "M 128"], measured: Any) -> Float[Array, "M D"]:
    """The queries, not to be multiplied long before what becomes of their scores.

    Products are the faster on some chips; left alone they are soon hundreds of results ahead, which are spilled. So 64
    queries wait for their old scores to be gathered, as the new ones take their place, and for queries before them to
    be measured. What they wait with is a zero that the compiler does not know to be one, added to the first of them:
    a sum of weights where it is below 0.
    """
    found = []
    for rows in tiles.steps(q.shape[0], 64):
        least = gathered[rows.start : rows.start + SUBLANES]
        before = min(rows.start - _BEHIND, (0 if measured is None else measured.shape[0]) - SUBLANES)
        if before >= 0:
            least = jnp.minimum(least, measured[before : before + SUBLANES])
        # Not the lesser of it and 0: one query's NaN would be another's.
        zero = jnp.where(least < 0, least, jnp.float32(0))
        held = min(rows.start + 2 * SUBLANES, rows.stop)
        zeros = tiles.across(jnp.concatenate([zero, zero]).astype(q.dtype), q.shape[1])
        found.append(q[rows.start : held] + zeros)
        if held < rows.stop:
            found.append(q[held : rows.stop])
    return jnp.concatenate(found)


class _Strip(NamedTuple):
    """Rows of a block of queries: of some heads all, or some of one head's."""

    heads: slice
    queries: slice
    rows: slice


def _strips(t: Tiles, most: int) -> list[_Strip]:
    """A block's queries, at most so many rows at once."""
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
    """A block's queries in memory: scores of the keys measured last, and per part and in 128 lanes what came before.

    Attributes:
      score: [parts, G, N, part]. peak: [parts, rows, 128], the largest score so far. shrink: what sums before it are
        to be lowered by. mass: the sum of weights but for the scores measured last.
    """

    t: Tiles
    score: Any
    peak: Any
    shrink: Any
    mass: Any

    def clear(self) -> None:
        self.peak[...] = jnp.full_like(self.peak, jnp.float32(NEG))
        self.mass[...] = jnp.zeros_like(self.mass)

    def lift(self, part: int, rows: Any, found: list[Array]) -> Array:
        """The peaks, where higher scores were found; what their sums are to be lowered by."""
        before = self.peak[part, rows]
        higher = functools.reduce(jnp.maximum, found, before)
        lower = jnp.exp2(before - higher)
        self.shrink[part, rows], self.peak[part, rows] = lower, higher
        return lower

    def lift_rows(self, _: Any, __: Any, rows: Any) -> None:
        """By the largest scores of every part, which lie where ``shrink`` will."""
        for part in range(self.t.parts):
            self.lift(part, rows, [self.shrink[part, rows]])

    def gather(self, part: int, at: _Strip) -> Array:
        """The weights of the scores measured last, added to the sum of those before."""
        scores = tiles.lanes(self.score[part, at.heads, at.queries].reshape(-1, self.t.part))
        weights = [jnp.exp2(x - self.peak[part, at.rows]) for x in scores]
        found = self.mass[part, at.rows] * self.shrink[part, at.rows] + functools.reduce(jnp.add, weights)
        self.mass[part, at.rows] = found
        return found

    def gather_all(self) -> None:
        for part in range(self.t.parts):
            self.gather(part, _whole(self.t))

    def meet(self, _: Any, __: Any, rows: Any) -> None:
        """The log-sum-exp, of all parts and lanes, in the first part's sums."""
        parts = range(self.t.parts)
        higher = functools.reduce(jnp.maximum, [self.peak[part, rows] for part in parts])
        top = jnp.broadcast_to(higher.max(axis=1, keepdims=True), higher.shape)
        lowered = [self.mass[part, rows] * jnp.exp2(self.peak[part, rows] - top) for part in parts]
        total = jnp.maximum(functools.reduce(jnp.add, lowered).sum(axis=1, keepdims=True), jnp.float32(1e-37))
        found = top * jnp.float32(1 / LOG2E) + jnp.log(total)
        self.mass[0, rows] = jnp.where(top > jnp.float32(NOTHING), found, jnp.float32(NEG))


def _kernel(offset, factor, q, k, out, score, peak, shrink, mass, *float32, t: Tiles):
    b, i, block = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    group = t.shape[2]
    first, first_key = i * jnp.int32(t.queries), block * jnp.int32(t.keys)
    first_query = offset[b * group] + first
    last = block == pl.num_programs(3) - 1
    rows = _Block(t, score, peak, shrink, mass)
    products: Any = float32_scores.Products(t, float32[0], float32[1], score) if float32 else None
    # Where products are faster than what becomes of them.
    fast = tiles.matrix_unit() > LANES

    @pl.when(block == 0)
    def _():
        rows.clear()
        if products:
            products.take_queries(q, factor[b])

    def measure(part: int, at: _Strip, masked: bool, hold_back: Any = None) -> Array | None:
        """A part's scores, and the peaks with them; if ``masked`` on fast products the peaks wait for ``lift_rows``."""
        if products:
            scores = products.last(at.heads, at.queries, part).reshape(-1, t.part)
        else:
            queries = q[at.heads, at.queries]
            if hold_back is not None:
                queries = _held_back(queries.reshape(-1, queries.shape[-1]), *hold_back)[None]
            scores = tiles.scores(queries, t.keys_of(k, part), t.columns) * factor[b]
        if masked:
            # Masked weights need no zeros: where a lane has seen no score they are exp2(0), and go with its first.
            ahead = first + jnp.int32(at.queries.start) - first_key - jnp.int32(part * t.part)
            heads = range(at.heads.start, at.heads.stop)
            scores = tiles.masked(scores, [offset[b * group + g] + ahead for g in heads])
        score[part, at.heads, at.queries] = scores.reshape(-1, at.queries.stop - at.queries.start, t.part)
        if masked and fast:
            shrink[part, at.rows] = functools.reduce(jnp.maximum, tiles.lanes(scores))
            return None
        return rows.lift(part, at.rows, tiles.lanes(scores))

    def measure_all(at: _Strip, masked: bool) -> None:
        for part in range(t.parts):
            measure(part, at, masked)

    def gather_and_measure() -> None:
        holds, measured = fast and t.rows > LANES, None
        for at in _strips(t, _UNIT if holds else t.rows):
            for part in range(t.parts):
                gathered = rows.gather(part, at)
                measured = measure(part, at, False, (gathered, measured) if holds else None)

    def add(chunk: slice) -> None:
        at = _whole(t)
        for part in range(t.parts):
            products.add(at.heads, at.queries, part, chunk)

    below = jnp.logical_and(block > 0, first_query >= first_key + jnp.int32(t.keys - 1))
    live = t.touched(first_query, first_key)
    crossed = jnp.logical_and(live, jnp.logical_not(below))
    strips = _strips(t, _ROWS if products else t.rows)
    if products:
        tiles.apart(jnp.logical_and(live, block > 0), rows.gather_all)
        pl.when(live)(functools.partial(products.take_keys, k))
        for chunk in products.first_chunks():
            tiles.apart(live, functools.partial(add, chunk))
        for at in strips:
            tiles.apart(below, functools.partial(measure_all, at, masked=False))
    else:
        tiles.apart(below, gather_and_measure)
        tiles.apart(jnp.logical_and(crossed, block > 0), rows.gather_all)
    for at in strips:
        tiles.apart(crossed, functools.partial(measure_all, at, masked=True))
    if fast:
        tiles.each_strip(t, crossed, rows.lift_rows, 32)
    tiles.apart(last, rows.gather_all)
    tiles.each_strip(t, last, rows.meet, 32)
    pl.when(last)(lambda: tiles.store_by_head(out, mass[0]))


def _memory(t: Tiles, itemsize: int) -> int | None:
    """VMEM to ask for: scores, peaks and sums, and blocks in flight."""
    scratch = 4 * t.rows * (t.keys + 3 * t.parts * LANES)
    if itemsize == 4:
        scratch += float32_scores.scratch_bytes(float32_scores.parts_scratch(t))
    return tiles.vmem_limit(scratch + 2 * itemsize * max(t.shape[4], LANES) * (t.rows + t.keys))


def call(p: Problem, t: Tiles, interpret: Any) -> Float[Array, "B H G N"]:
    batch, heads, group, _, dim = t.shape

    def key_block(b, h, i, block, offset, *_):
        return b, h, jnp.minimum(block, t.last_key_block(offset[b * group], i))

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(batch, heads, t.query_blocks, t.key_blocks(p.offset)),
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
        functools.partial(_kernel, t=t),
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
