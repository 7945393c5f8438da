"""On TPUs, in Pallas: both passes read every key once, and only up to the diagonal.

* The grid's axis over keys is as long as the furthest query needs, a traced number.
* XLA turns the normalisers so that a block's queries lie along the sublanes, as scores have them; the kernel spreads a
  lane of them over the others while the first products run.
* The queries of a group are one matrix product; the mass is summed a head apart, in 8 sublanes until the last block.
* Masks are compared and selected in blocks that the diagonal crosses only, for the log-sum-exp in the first one too;
  for the mass in a loop that ends at the diagonal, whose turn takes few enough scores that they and their masks fit the
  registers.
* A block's scores are computed in parts: 256 keys for the mass, used as they leave the product, 512 for the
  log-sum-exp, whose running maximum and sum, in 128 lanes and a part apart, meet in the last block.
* The log-sum-exp's scores are written to memory as they leave the product, and read again for the weights a turn later,
  while that turn's products run: what waits for exponentials holds no registers that the products need.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import tpu_tiles
from pallas_kernels.attention_mass import xla
from pallas_kernels.attention_mass.problem import Counting, Masses, Problem
from pallas_kernels.softmax import LOG2E, NEG, NOTHING, merge_log
from pallas_kernels.tpu_tiles import LANES, SUBLANES, Config, Tiles

#: Keys whose scores are multiplied at once for the mass; of more there would not be registers enough.
_PART = 256
#: Rows of queries that a turn of the loop over a block on the diagonal takes at most.
_ROWS = 512
#: Rows of queries whose scores are masked together where the matrix unit is the larger one and results come faster.
_STRIP = 256


def log_sum_exp(p: Problem, *, config: Config | None = None, interpret: Any = False) -> Float[Array, "B H G N"]:
    """See :func:`pallas_kernels.attention_mass.log_sum_exp`; the kept rows' part is XLA's."""
    _check(p)
    lse = _log_sum_exp_call(p, Tiles.of(p.q, p.k, config), interpret)[..., : p.q.shape[3]]
    return lse if p.kept is None else merge_log(lse, xla.kept_log_sum_exp(p))


def attention_mass(p: Problem, c: Counting, *, config: Config | None = None, interpret: Any = False) -> Masses:
    """See :func:`pallas_kernels.attention_mass.attention_mass`; the kept rows' part is XLA's."""
    _check(p)
    t = Tiles.of(p.q, p.k, config, _PART)
    tokens = p.k.shape[2]
    onto = jnp.zeros((*p.q.shape[:3], tokens), jnp.float32) if c.onto is None else c.onto.new
    new = _mass_call(p, c, t, tpu_tiles.padded(onto, 3, t.keys), interpret)[..., :tokens]
    return Masses(new, None if p.kept is None else xla.kept_mass(p, c))


def _check(p: Problem) -> None:
    if p.bias is not None:
        raise NotImplementedError("The TPU kernels know no bias that depends on places (ALiBi).")


def _each_part(t: Tiles, first_query: Array, first_key: Array, run: Any) -> None:
    """``run(part, first head, heads, masked)`` for every part of a block below the diagonal.

    Of one that the diagonal crosses for the parts up to it, in a loop and some heads at a time: masks take registers.
    """
    group = t.shape[2]
    below = first_query >= first_key + jnp.int32(t.keys - 1)

    @pl.when(below)
    def _():
        for part in range(t.parts):
            run(part, 0, group, False)

    count = max(x for x in range(1, group + 1) if group % x == 0 and (x == 1 or x * t.queries <= _ROWS))
    strips = jnp.int32(group // count)

    def turn(at: Any, _: Any) -> None:
        run(jax.lax.div(at, strips), jax.lax.rem(at, strips) * jnp.int32(count), count, True)

    last = jax.lax.div(jnp.maximum(first_query + jnp.int32(t.queries - 1) - first_key, 0), jnp.int32(t.part))
    crossed = jnp.logical_and(t.touched(first_query, first_key), jnp.logical_not(below))
    turns = jnp.where(crossed, jnp.minimum(last + 1, t.parts) * strips, 0)
    jax.lax.fori_loop(jnp.int32(0), turns, turn, None)


def _pieces(t: Tiles) -> list[slice]:
    """A head's queries by 128: of no more are masks and normalisers held at once."""
    return [slice(at, min(at + LANES, t.queries)) for at in range(0, t.queries, LANES)]


def _shares(scores: Array, normaliser: Array, distance: Array | None, ahead: Array) -> list[Float[Array, "8 128"]]:
    """What a piece's queries give, in groups of 128 keys and still in 8 sublanes."""
    found = tpu_tiles.lanes(scores)
    if distance is not None:
        found = [
            jnp.where(distance <= ahead - jnp.int32(at * LANES), x, jnp.float32(NEG)) for at, x in enumerate(found)
        ]
    return [jnp.exp2(x - normaliser).reshape(-1, SUBLANES, LANES).sum(axis=0) for x in found]


def _lanes_of_block(t: Tiles) -> int:
    """Of the normalisers: a lane for each piece of each head, as many as 128 or more are a multiple of."""
    return 1 << (t.shape[2] * len(_pieces(t)) - 1).bit_length()


def _normaliser_columns(x: Float[Array, "B H G N"], t: Tiles) -> Float[Array, "B H R L"]:
    """The queries of a piece along the sublanes, as scores have them; pieces, heads and blocks side by side.

    Turned by XLA. The kernel spreads a lane over the others, which is less work than it was to turn them there.
    """
    batch, heads, group, _, _ = t.shape
    pieces, rows = len(_pieces(t)), min(t.queries, LANES)
    x = tpu_tiles.padded(x.reshape(batch, heads, group, t.query_blocks, t.queries), 4, rows)
    x = x.reshape(batch, heads, group, t.query_blocks, pieces, rows).swapaxes(2, 3)
    x = tpu_tiles.padded(x.reshape(batch, heads, t.query_blocks, group * pieces, rows), 3, _lanes_of_block(t))
    return tpu_tiles.padded(x.reshape(batch, heads, -1, rows), 2, LANES).swapaxes(2, 3)


def _spread(beside: Any, normaliser: Any, block: Array, piece: Any, t: Tiles) -> None:
    """Write the normalisers of a piece of a block's queries beside them, the same in every lane."""
    rows, width = beside.shape[0], normaliser.shape[1]
    lane = jax.lax.rem(block * jnp.int32(_lanes_of_block(t)), jnp.int32(width)) + piece
    column = normaliser[:rows]
    if width > LANES:
        tile = pl.multiple_of(jax.lax.div(lane, jnp.int32(LANES)) * LANES, LANES)
        column, lane = normaliser[:rows, pl.ds(tile, LANES)], lane - tile
    index = jnp.broadcast_to(lane, column.shape)
    beside[...] = jnp.take_along_axis(column, index, axis=1, mode="promise_in_bounds")


def _mass_kernel(offset, factor, live, q, normaliser, k, onto, out, total, beside, distance, *, t: Tiles):
    b, block, i = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    first_query, first_key = offset[b] + i * jnp.int32(t.queries), block * jnp.int32(t.keys)

    @pl.when(i == 0)
    def _():
        total[...] = jnp.zeros_like(total)
        query, key = (jax.lax.broadcasted_iota(jnp.int32, distance.shape, axis) for axis in (0, 1))
        distance[...] = key - query

    def add(part: Any, first: Any, count: int, masked: bool) -> None:
        """Of one part of the keys and ``count`` heads from ``first`` on."""
        keys = t.keys_of(k, part)
        ahead = first_query - first_key - part * jnp.int32(t.part)
        for at in _pieces(t):
            scores = tpu_tiles.scores(q[pl.ds(first, count), at], keys, t.columns) * factor[b]
            rows = at.stop - at.start
            for g in range(count):
                if masked or part == 0:
                    _spread(beside.at[g, at], normaliser, i, (first + g) * len(_pieces(t)) + at.start // LANES, t)
                places = distance[:rows] if masked else None
                shares = _shares(scores[g * rows : (g + 1) * rows], beside[g, at], places, ahead + at.start)
                for lane, share in enumerate(shares):
                    total[part, first + g, :, lane * LANES : (lane + 1) * LANES] += share

    @pl.when(live[b * pl.num_programs(3) + i] != 0)
    def _():
        _each_part(t, first_query, first_key, add)

    @pl.when(i == pl.num_programs(3) - 1)
    def _():
        for part in range(t.parts):
            at = slice(part * t.part, (part + 1) * t.part)
            out[:, at] = onto[:, at] + total[part].sum(axis=1)


def _mass_call(p: Problem, c: Counting, t: Tiles, onto: Array, interpret: Any) -> Float[Array, "B H G T"]:
    batch, heads, group, _, dim = t.shape
    weight = jnp.ones((batch, t.count), jnp.float32) if c.weight is None else c.weight
    weight = tpu_tiles.padded(weight.astype(jnp.float32), 1, t.queries)
    live = (weight > 0).reshape(batch * t.query_blocks, t.queries).any(axis=1).astype(jnp.int32)
    # A weight is the normaliser's business: w exp(s - lse) = exp(s - (lse - log w)), and one of 0 makes it infinite.
    log_weight = jnp.log(jnp.maximum(weight, jnp.finfo(jnp.float32).tiny))[:, None, None]
    lse = t.query_rows(c.lse)
    counts = (weight[:, None, None] > 0) & (lse > NOTHING)
    normaliser = jnp.where(counts, (lse - log_weight) * jnp.float32(LOG2E), jnp.float32(-NEG))
    normaliser = _normaliser_columns(normaliser, t)
    width = max(LANES, _lanes_of_block(t))

    def of_queries(*tail):
        return lambda b, h, block, i, offset, *_: (
            (b, h, 0, jnp.maximum(i, t.first_query_block(offset[b], block)), *tail)
        )

    def of_normaliser(b, h, block, i, offset, *_):
        i = jnp.maximum(i, t.first_query_block(offset[b], block))
        return b, h, 0, jax.lax.div(i * jnp.int32(_lanes_of_block(t)), jnp.int32(width))

    mass = pl.BlockSpec((None, None, group, t.keys), lambda b, h, block, i, *_: (b, h, 0, block))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(batch, heads, t.key_blocks(p.offset), t.query_blocks),
        in_specs=[
            pl.BlockSpec((None, None, group, t.queries, dim), of_queries(0)),
            pl.BlockSpec((None, None, min(t.queries, LANES), width), of_normaliser),
            t.key_spec(lambda b, h, block, *_: (b, h, block)),
            mass,
        ],
        out_specs=mass,
        scratch_shapes=[
            pltpu.VMEM((t.parts, group, SUBLANES, t.part), jnp.float32),
            pltpu.VMEM((group, t.queries, LANES), jnp.float32),
            pltpu.VMEM((min(t.queries, LANES), LANES), jnp.int32),
        ],
    )
    return pl.pallas_call(
        functools.partial(_mass_kernel, t=t),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct(onto.shape, jnp.float32),
        # Blocks of keys beyond the last query are not visited and keep what they had.
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        ),
        cost_estimate=t.cost(p.k.dtype.itemsize, 1, 4 * (normaliser.size + 2 * onto.size)),
        name="attention_mass",
        interpret=interpret,
    )(p.offset, p.scale * jnp.float32(LOG2E), live, t.query_rows(p.q), normaliser, t.key_rows(p.k), onto)


class _Strip(NamedTuple):
    """Rows of a block of queries: of some heads all, or some of one head's."""

    heads: slice
    queries: slice
    rows: slice


def _strips(t: Tiles, most: int) -> list[_Strip]:
    """A block's queries, at most so many rows at once."""
    group = t.shape[2]
    count = max(x for x in range(1, group + 1) if group % x == 0 and (x == 1 or x * t.queries <= most))
    found = []
    for heads in tpu_tiles.steps(group, count):
        for queries in tpu_tiles.steps(t.queries, t.queries if count > 1 else most):
            start, rows = heads.start * t.queries + queries.start, count * (queries.stop - queries.start)
            found.append(_Strip(heads, queries, slice(start, start + rows)))
    return found


def _log_sum_exp_kernel(offset, factor, q, k, out, score, peak, shrink, mass, *, t: Tiles):
    b, i, block = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    group = t.shape[2]
    first, first_key = i * jnp.int32(t.queries), block * jnp.int32(t.keys)
    first_query = offset[b * group] + first
    last = block == pl.num_programs(3) - 1

    @pl.when(block == 0)
    def _():
        peak[...] = jnp.full_like(peak, jnp.float32(NEG))
        mass[...] = jnp.zeros_like(mass)

    def measure(part: Any, at: _Strip, masked: bool) -> None:
        """A part's scores; the largest so far, in 128 lanes apart, and what the sums before it are to be lowered by."""
        scores = tpu_tiles.scores(q[at.heads, at.queries], t.keys_of(k, part), t.columns) * factor[b]
        if masked:
            # Masked weights need no zeros: where a lane has seen no score they are exp2(0), and go with its first.
            ahead = first + jnp.int32(at.queries.start) - first_key - jnp.int32(part * t.part)
            heads = range(at.heads.start, at.heads.stop)
            scores = tpu_tiles.masked(scores, [offset[b * group + g] + ahead for g in heads])
        before = peak[part, at.rows]
        higher = functools.reduce(jnp.maximum, tpu_tiles.lanes(scores), before)
        score[part, at.rows], shrink[part, at.rows], peak[part, at.rows] = scores, jnp.exp2(before - higher), higher

    def gather(part: int) -> None:
        """The weights of the scores that were measured last."""
        weights = [jnp.exp2(scores - peak[part]) for scores in tpu_tiles.lanes(score[part])]
        mass[part] = mass[part] * shrink[part] + functools.reduce(jnp.add, weights)

    def gather_and_measure() -> None:
        for part in range(t.parts):
            gather(part)
            measure(part, _strips(t, t.rows)[0], masked=False)

    def measure_masked(at: _Strip) -> None:
        if q.dtype == jnp.float32:  # Six products a score: the registers of one part at a time.
            jax.lax.fori_loop(jnp.int32(0), jnp.int32(t.parts), lambda part, _: measure(part, at, masked=True), None)
            return
        for part in range(t.parts):
            measure(part, at, masked=True)

    def gather_all() -> None:
        for part in range(t.parts):
            gather(part)

    below = jnp.logical_and(block > 0, first_query >= first_key + jnp.int32(t.keys - 1))
    crossed = jnp.logical_and(t.touched(first_query, first_key), jnp.logical_not(below))
    tpu_tiles.apart(below, gather_and_measure)
    tpu_tiles.apart(jnp.logical_and(crossed, block > 0), gather_all)
    for at in _strips(t, _STRIP if tpu_tiles.matrix_unit() > LANES else t.rows):
        tpu_tiles.apart(crossed, functools.partial(measure_masked, at))
    tpu_tiles.apart(last, gather_all)

    def meet() -> None:
        """All parts, in the first one's place."""
        higher = functools.reduce(jnp.maximum, [peak[part] for part in range(t.parts)])
        mass[0] = functools.reduce(jnp.add, [mass[part] * jnp.exp2(peak[part] - higher) for part in range(t.parts)])
        peak[0] = higher

    def meet_across() -> None:
        """All lanes."""
        top = jnp.broadcast_to(peak[0].max(axis=1, keepdims=True), peak.shape[1:])
        mass[0] = mass[0] * jnp.exp2(peak[0] - top)
        peak[0] = top

    # Apart, as what waits for sums across lanes would fill the registers.
    tpu_tiles.apart(last, meet)
    tpu_tiles.apart(last, meet_across)

    @pl.when(last)
    def _():
        top = peak[0]
        total = mass[0].sum(axis=1, keepdims=True)
        found = top * jnp.float32(1 / LOG2E) + jnp.log(jnp.maximum(total, jnp.float32(1e-37)))
        tpu_tiles.store_by_head(out, jnp.where(top > jnp.float32(NOTHING), found, jnp.float32(NEG)))


def _memory(t: Tiles, itemsize: int) -> int | None:
    """VMEM to ask for: scores, peaks and sums, and blocks in flight."""
    scratch = 4 * t.rows * (t.keys + 3 * t.parts * LANES)
    return tpu_tiles.vmem_limit(scratch + 2 * itemsize * max(t.shape[4], LANES) * (t.rows + t.keys))


def _log_sum_exp_call(p: Problem, t: Tiles, interpret: Any) -> Float[Array, "B H G N"]:
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
            pltpu.VMEM((t.parts, t.rows, t.part), jnp.float32),
            *[pltpu.VMEM((t.parts, t.rows, LANES), jnp.float32)] * 3,
        ],
    )
    out = jax.ShapeDtypeStruct(t.shape[:4], jnp.float32)
    return pl.pallas_call(
        functools.partial(_log_sum_exp_kernel, t=t),
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
