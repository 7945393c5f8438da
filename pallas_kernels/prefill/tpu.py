"""On TPUs, in Pallas: flash attention (Dao, arXiv 2307.08691) whose chunk may be anywhere.

The offset is data: JAX's splash attention takes it as part of the mask, a static one, and would be compiled again for
every chunk of a long prompt. The grid's axis over keys is as long as the furthest query needs, a traced number too,
and blocks above the diagonal are neither read nor computed. All G queries of a token share one read of the keys, and
masks are compared in blocks that the diagonal crosses only. The log-sum-exp leaves lane-major.

A block of scores is 16 times the registers. It is written to memory as it leaves the product, in parts of 512 keys, and
read again for the weights. Nothing that one part stores is loaded by the next: the compiler would keep it in registers.
Nor does a head's mask serve the next head: each compares distances of its own, which are its copy of the offset.

For units of 256 x 256 weights are made in the order in which these take them, a few rows waiting for the ones before
the last: else peaks are subtracted from scores long before the powers are raised, one register a cycle. Where one part
is all of a block there is no next product to overlap with, and fewer rows are weighed together instead. Scheduled, the
order costs 3 % or less, on tpu7x 9 to 15 % for 256 channels; fewer rows 3 to 25 %, most against 128 keys.

Of float32 keys, see :mod:`pallas_kernels.prefill.tpu_float32`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels import checks, tpu_tiles, tuned
from pallas_kernels.prefill import tpu_float32, xla
from pallas_kernels.prefill.problem import Prefilled, Problem
from pallas_kernels.softmax import LOG2E, NEG, NOTHING, merge, per_row
from pallas_kernels.tpu_float32 import scratch_bytes
from pallas_kernels.tpu_tiles import LANES, Config, Tiles


def prefill(p: Problem, *, config: Config | None = None, interpret: Any = False) -> Prefilled:
    """See :func:`pallas_kernels.prefill.prefill`; the kept rows' part is XLA's."""
    if p.bias is not None:
        raise NotImplementedError("The TPU kernel knows no bias that depends on places (ALiBi).")
    checks.compiled_in(p.scale)
    config = config or tuned.config("prefill.tpu", p, Config) or rule(p)
    out, lse = _call(p, Tiles.of(p.q, p.k, config), interpret)
    if p.kept is None:
        return Prefilled(out, lse)
    out, lse = merge(out, lse, *xla.rows_alone(p))
    return Prefilled(out.astype(p.q.dtype), lse)


def rule(p: Problem) -> Config:
    """Sizes where none are given or measured.

    Parts of so few keys that what comes out of the matrix units in several rounds is not many registers.
    """
    unit, dim = tpu_tiles.matrix_unit(), p.q.shape[4]
    found = Config.default(p.q.shape[2], p.q.shape[3], p.k.shape[2], p.k.dtype)
    rounds = p.k.dtype == jnp.float32 or dim > max(LANES, unit)
    return dataclasses.replace(found, part=2 * unit) if rounds else found


def _kernel(offset, length, q, k, v, out, lse, score, found_peak, peak, shrink, mass, total, *parts, t: Tiles, factor):
    b, i, block = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    group = t.shape[2]
    first = i * jnp.int32(t.queries)
    first_query, first_key = offset[b * group] + first, block * jnp.int32(t.keys)
    counted, last = first < length[b], block == pl.num_programs(3) - 1
    live = jnp.logical_and(counted, t.touched(first_query, first_key))
    float32: Any = tpu_float32.Blocks(t, *parts) if parts else None
    order, every_row = _Order.of(t, float32 is not None), slice(0, t.rows)
    # Two numbers that are 0, which the compiler does not know: what is stored from one it does not load from the other
    # before, and what is stored from the same it may.
    bases = [jnp.minimum(length[b] + jnp.int32(x), 0) for x in range(2)] if order.follow else [0, 0]

    @pl.when(block == 0)
    def _():
        peak[...] = jnp.full_like(peak, jnp.float32(NEG))
        mass[...] = jnp.zeros_like(mass)
        for part in range(t.parts):
            for at in order.sums_at(t):
                score[part, :, at : at + LANES] = jnp.zeros_like(mass)
        for part in range(total.shape[0]):
            total[part] = jnp.zeros_like(total[part])
        if float32:
            float32.take_queries(q, jnp.float32(factor))

    def measure(masked: bool) -> None:
        """Scores, and the largest of each part, in 128 lanes apart."""
        for part in range(t.parts):
            if float32:
                scores = float32.last_scores(score, part)
            else:
                scores = tpu_tiles.scores(q[...], t.keys_of(k, part), t.columns) * jnp.float32(factor)
            if masked:
                # Masked weights need no zeros: who sees key 0 has a score for a peak from the first block on, and who
                # does not sees nothing, as is said at the end.
                ahead = [offset[b * group + g] + first - first_key - jnp.int32(part * t.part) for g in range(group)]
                scores = tpu_tiles.masked(scores, ahead)
            score[part, :, : t.part] = scores
            found_peak[part] = functools.reduce(jnp.maximum, tpu_tiles.lanes(scores))

    def whole_mass(rows: Any) -> Any:
        found = [score[part, rows, at : at + LANES] for part in range(t.parts) for at in order.sums_at(t)]
        return functools.reduce(jnp.add, found, mass[rows])

    def lift(rows: slice) -> None:
        """The peaks so far, the same in every lane, and what the weights gathered before it are with them."""
        top = functools.reduce(jnp.maximum, [found_peak[part, rows] for part in range(t.parts)])
        higher = jnp.maximum(peak[rows], top.max(axis=1, keepdims=True))
        shrink[rows] = jnp.exp2(peak[rows] - higher)
        mass[rows] = whole_mass(rows) * shrink[rows]
        for part in range(order.early):
            total[part, rows] = total[part, rows] * tpu_tiles.across(shrink[rows], total.shape[2])
        peak[rows] = higher

    def weights_of(part: int, rows: Any, keys: slice, turn: int = 0) -> list[Array]:
        """Of some keys of a part; ``turn`` numbers what must follow what."""
        there = score[bases[(turn + 1) % 2] + part, rows, keys]
        weights = [jnp.exp2(scores - peak[rows]) for scores in tpu_tiles.lanes(there)]
        at = t.part + keys.start // order.keys * LANES
        score[bases[turn % 2] + part, rows, at : at + LANES] = functools.reduce(jnp.add, weights)
        return weights

    def weights(parts: range, rows: slice, turn: int) -> list[Array]:
        """Of these parts in bfloat16, made in the order in which the matrix units take them."""
        strips = tpu_tiles.steps(rows.stop - rows.start, order.rows)
        keys = tpu_tiles.steps(t.part, order.keys)
        made = {}
        for at in itertools.product(range(len(keys)), range(len(strips)), parts):
            i, j, part = at
            strip = slice(rows.start + strips[j].start, rows.start + strips[j].stop)
            found = weights_of(part, strip, keys[i], turn + len(made))
            made[at] = jnp.concatenate([x.astype(v.dtype) for x in found], axis=1)

        def whole(part: int, i: int) -> Array:
            return jnp.concatenate([made[i, j, part] for j in range(len(strips))])

        return [jnp.concatenate([whole(part, i) for i in range(len(keys))], axis=1) for part in parts]

    def gather(rows: slice) -> None:
        """Weights and what they weigh. Each part has sums of its own, which meet in the last block."""
        turns = -(-(rows.stop - rows.start) // order.rows) * -(-t.part // order.keys)
        for first in range(0, t.parts, order.parts):
            parts = range(first, min(first + order.parts, t.parts))
            for part, weight in zip(parts, weights(parts, rows, first * turns), strict=True):
                weighed = tpu_tiles.dot(weight, t.keys_of(v, part), 1 if t.columns else 0)
                so_far = total[part, rows]
                if part >= order.early:
                    so_far *= tpu_tiles.across(shrink[rows], total.shape[2])
                total[part, rows] = so_far + weighed

    def cut_weights(_: Any, __: Any, rows: Any) -> None:
        for part in range(t.parts):
            float32.take_weights(part, rows, weights_of(part, rows, slice(0, t.part)))

    if float32:
        pl.when(live)(functools.partial(float32.take_keys, k))
        pl.when(live)(functools.partial(float32.take_values, v))
        for chunk in float32.first_chunks():
            tpu_tiles.apart(live, functools.partial(float32.add_scores, score, chunk))
    pl.when(counted)(lambda: tpu_tiles.each_way(t, first_query, first_key, measure))
    for rows in _strips(t) if order.follow else [every_row]:
        tpu_tiles.apart(live, functools.partial(lift, rows))
    if float32:
        tpu_tiles.each_strip(t, live, cut_weights, 64)
        pl.when(live)(functools.partial(float32.gather, total, shrink))
    else:
        *others, rest = _strips(t)
        for rows in others:
            tpu_tiles.apart(live, functools.partial(gather, rows))
        pl.when(live)(functools.partial(gather, rest))

    def finish(head: Array, queries: Any, rows: Any) -> None:
        """What a head's rows come to, and their log-sum-exp, where ``shrink`` was."""
        # Infinite where a query sees nothing, whose weights are of no keys of its own.
        every = jnp.where(peak[rows] > jnp.float32(NOTHING), whole_mass(rows), jnp.float32(jnp.inf))
        every = jnp.maximum(every.sum(axis=1, keepdims=True), jnp.float32(1e-37))
        whole = total[:, rows].sum(axis=0) / every
        out[head, queries] = whole.astype(out.dtype)
        found = peak[rows] * jnp.float32(1 / LOG2E) + jnp.log(every)
        shrink[rows] = jnp.where(peak[rows] > jnp.float32(NOTHING), found, jnp.float32(NEG))

    tpu_tiles.each_strip(t, last, finish, 64)

    @pl.when(last)
    def _():
        # So few heads at once that they fit the registers.
        for heads in tpu_tiles.steps(group, max(1, 512 // t.queries)):
            rows = slice(heads.start * t.queries, heads.stop * t.queries)
            tpu_tiles.store_by_head(lse.at[heads], shrink[rows])


@dataclasses.dataclass(frozen=True)
class _Order:
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
    def of(cls, t: Tiles, float32: bool) -> _Order:
        """As the chip's matrix units take the weights; of small units, which leave registers enough, as they come."""
        if float32 or t.parts == 1 or tpu_tiles.matrix_unit() < 256:
            return cls(1, t.part, t.rows, False, 1 if t.columns and not float32 else 0)
        # All alike where that is possible, and not all at once.
        rows = next((x for x in (64, 48, 32) if t.rows > x and t.rows % x == 0), min(64, t.rows // 32 * 32 or t.rows))
        if t.shape[4] > LANES and tpu_tiles.sums_in_unit():
            # Each unit takes a part of its own, all rows of as many keys as it holds and then of the next.
            return cls(2, min(256, t.part), rows, True, 0)
        return cls(1, t.part, rows, True, t.parts // 2)

    def sums_at(self, t: Tiles) -> list[int]:
        """Where the sums of a part's weights lie: behind its scores, 128 lanes for as many keys as are made at once."""
        return [t.part + i * LANES for i in range(-(-t.part // self.keys))]


def _strips(t: Tiles) -> list[slice]:
    """Rows that are weighed together: so few that what is made early fits the registers."""
    wide = t.shape[4] > LANES
    if tpu_tiles.matrix_unit() < 256:
        rows = 512 if wide and t.part > 256 else t.rows
    elif wide or t.part < 256:
        rows = 512
    else:
        rows = 1024 if t.parts == 1 and tpu_tiles.sums_in_unit() else t.rows
    return tpu_tiles.steps(t.rows, rows)


def _memory(t: Tiles, itemsize: int) -> int | None:
    """VMEM to ask for, as for 2,048 rows of 256 channels (G = 16).

    Scores, sums, blocks in flight and the parts of float32 numbers.
    """
    dim = t.shape[4]
    sums = tpu_float32.sums(t) if itemsize == 4 else t.parts
    gained = len(_Order.of(t, itemsize == 4).sums_at(t))
    scratch = 4 * t.rows * (t.keys + ((1 + gained) * t.parts + 3) * LANES + sums * max(dim, LANES))
    if itemsize == 4:
        scratch += scratch_bytes(tpu_float32.scratch(t))
    return tpu_tiles.vmem_limit(scratch + 4 * itemsize * max(dim, LANES) * (t.rows + t.keys))


def _call(p: Problem, t: Tiles, interpret: Any) -> Any:
    batch, heads, group, _, dim = t.shape
    float32 = p.k.dtype == jnp.float32
    offset = per_row(p.offset, batch, jnp.int32)
    length = per_row(t.count if p.length is None else p.length, batch, jnp.int32)

    def key_block(b, h, i, block, offset, length):
        last = t.last_key_block(offset[b * group], i)
        return b, h, jnp.minimum(block, jnp.where(i * jnp.int32(t.queries) < length[b], last, 0))

    rows = pl.BlockSpec((None, None, group, t.queries, dim), lambda b, h, i, *_: (b, h, 0, i, 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(batch, heads, t.query_blocks, t.key_blocks(offset)),
        in_specs=[rows, t.key_spec(key_block), t.key_spec(key_block)],
        out_specs=[rows, pl.BlockSpec((None, None, group, t.queries), lambda b, h, i, *_: (b, h, 0, i))],
        scratch_shapes=[
            pltpu.VMEM((t.parts, t.rows, _Order.of(t, float32).sums_at(t)[-1] + LANES), jnp.float32),
            pltpu.VMEM((t.parts, t.rows, LANES), jnp.float32),
            pltpu.VMEM((t.rows, LANES), jnp.float32),
            pltpu.VMEM((t.rows, LANES), jnp.float32),
            pltpu.VMEM((t.rows, LANES), jnp.float32),
            pltpu.VMEM((tpu_float32.sums(t) if float32 else t.parts, t.rows, dim), jnp.float32),
            *(tpu_float32.scratch(t) if float32 else ()),
        ],
    )
    out = [jax.ShapeDtypeStruct(t.shape, p.q.dtype), jax.ShapeDtypeStruct(t.shape[:4], jnp.float32)]
    found, lse = pl.pallas_call(
        functools.partial(_kernel, t=t, factor=p.scale * LOG2E),
        grid_spec=grid,
        out_shape=out,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=_memory(t, p.k.dtype.itemsize),
        ),
        cost_estimate=t.cost(p.k.dtype.itemsize, 2, sum(x.size * x.dtype.itemsize for x in out)),
        name="prefill",
        interpret=interpret,
    )(jnp.repeat(offset, group), length, t.query_rows(p.q), t.key_rows(p.k), t.key_rows(p.v))
    return found[:, :, :, : t.count], lse[..., : t.count]
