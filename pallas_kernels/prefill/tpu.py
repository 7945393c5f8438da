"""Pallas TPU kernel: flash attention (Dao, arXiv 2307.08691) of a chunk at any offset in the prompt.

The offset is data. JAX's splash attention has it in its static mask, and would be compiled again for every chunk of a
long prompt. The grid's axis over keys has a traced length, as long as the last query needs, and blocks above the
diagonal are neither read nor computed. All G queries of a token share one read of the keys, and masks are applied only
in blocks that the diagonal crosses. The log-sum-exp is stored with queries along the lanes.

See :mod:`pallas_kernels.prefill.tpu_block` for a block's scores and weights, and for float32 keys
:mod:`pallas_kernels.prefill.tpu_float32`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import argument_checks, tuned
from pallas_kernels.prefill import tpu_float32, xla
from pallas_kernels.prefill.prefill_problem import Prefilled, Problem
from pallas_kernels.prefill.tpu_block import Block, Order, strips
from pallas_kernels.softmax import LOG2E, capped_log2, per_row
from pallas_kernels.tpu import tiles
from pallas_kernels.tpu.float32_scores import scratch_bytes
from pallas_kernels.tpu.tiles import LANES, Config, Tiles


def prefill(p: Problem, *, config: Config | None = None, interpret: Any = False) -> Prefilled:
    """See :func:`pallas_kernels.prefill.prefill`; kept rows are attended to in XLA."""
    if p.bias is not None:
        raise NotImplementedError("The TPU kernel has no bias by positions (ALiBi).")
    tiles.check_dtype(p.k.dtype)
    argument_checks.compiled_in(p.scale, p.soft_cap)
    config = config or tuned.config("prefill.tpu", p, Config) or rule(p)
    return xla.with_kept_rows(p, *_call(p, Tiles.of(p.q, p.k, config, window=p.window), interpret))


def rule(p: Problem) -> Config:
    """Default sizes.

    Where the matrix units take several passes over the channels, parts have few keys: partial sums wait in registers.
    """
    unit, dim = tiles.matrix_unit(), p.q.shape[4]
    found = Config.default(p.q.shape[2], p.q.shape[3], p.k.shape[2], p.k.dtype)
    rounds = p.k.dtype == jnp.float32 or dim > max(LANES, unit)
    return dataclasses.replace(found, part=2 * unit) if rounds else found


def _kernel(offset, length, q, k, v, out, lse, *scratch, t: Tiles, factor, soft_cap):
    score, found_peak, peak, shrink, mass, total, *parts = scratch
    b, i, block = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    group = t.shape[2]
    first = i * jnp.int32(t.queries)
    first_query = offset[b * group] + first
    first_key = (t.first_key_block(first_query) + block) * jnp.int32(t.keys)
    counted, last = first < length[b], block == pl.num_programs(3) - 1
    live = jnp.logical_and(counted, t.touched(first_query, first_key))
    float32: Any = tpu_float32.Blocks(t, *parts) if parts else None
    order = Order.of(t, float32 is not None)
    bases = [jnp.minimum(length[b] + jnp.int32(x), 0) for x in range(2)] if order.follow else [0, 0]
    rows = Block(t, order, bases, score, found_peak, peak, shrink, mass, total)

    @pl.when(block == 0)
    def _():
        rows.clear()
        if float32:
            float32.take_queries(q, jnp.float32(factor))

    def bound(masked: bool, part: int, head: Any, queries: Any, strip: Any) -> None:
        """Cap and mask a few rows of stored scores: as they leave the matrix units, they would spill."""
        scores = capped_log2(score[part, strip, : t.part], soft_cap)
        if masked:
            ahead = offset[b * group + head] + first + queries.start - first_key - jnp.int32(part * t.part)
            scores = tiles.masked(scores, [ahead], t.window)
        rows.take(part, scores, strip)

    def later(masked: bool) -> bool:
        return soft_cap is not None or (masked and t.window is not None)

    def measure(masked: bool) -> None:
        for part in range(t.parts):
            if float32:
                scores = float32.last_scores(score, part)
            else:
                scores = tiles.scores(q[...], t.keys_of(k, part), t.columns) * jnp.float32(factor)
            if later(masked):
                rows.score[part, :, : t.part] = scores
                continue
            if masked:
                # Masked weights need no zeros: a query's first real peak removes them, its own key's at the latest, and
                # one without any key attends to nothing, which ``finish`` handles. Each head compares with its own
                # copy of the offset: the compiler would keep the masks of one head for the next.
                ahead = [offset[b * group + g] + first - first_key - jnp.int32(part * t.part) for g in range(group)]
                scores = tiles.masked(scores, ahead)
            rows.take(part, scores)

    def cut_weights(_: Any, __: Any, strip: Any) -> None:
        for part in range(t.parts):
            float32.take_weights(part, strip, rows.weights_of(part, strip, slice(0, t.part)))

    if float32:
        pl.when(live)(functools.partial(float32.take_keys, k))
        pl.when(live)(functools.partial(float32.take_values, v))
        for chunk in float32.first_chunks():
            tiles.scheduling_barrier(live, functools.partial(float32.add_scores, score, chunk))
    pl.when(counted)(lambda: tiles.masked_or_not(t, first_query, first_key, measure))
    whole = t.whole(first_query, first_key)
    for masked, there in ((False, whole), (True, jnp.logical_not(whole))):
        for part in range(t.parts if later(masked) else 0):
            tiles.each_strip(t, jnp.logical_and(live, there), functools.partial(bound, masked, part), 64)
    for strip in strips(t) if order.follow else [slice(0, t.rows)]:
        tiles.scheduling_barrier(live, functools.partial(rows.lift, strip))
    if float32:
        tiles.each_strip(t, live, cut_weights, 64)
        pl.when(live)(functools.partial(float32.gather, total, shrink))
    else:
        *others, rest = strips(t)
        for strip in others:
            tiles.scheduling_barrier(live, functools.partial(rows.gather, v, strip))
        pl.when(live)(functools.partial(rows.gather, v, rest))
    tiles.each_strip(t, last, functools.partial(rows.finish, out), 64)

    @pl.when(last)
    def _():
        # As many heads at once as fit the registers.
        for heads in tiles.steps(group, max(1, 512 // t.queries)):
            tiles.store_by_head(lse.at[heads], shrink[heads.start * t.queries : heads.stop * t.queries])


def _memory(t: Tiles, itemsize: int) -> int | None:
    """VMEM limit for scores, sums, blocks in flight and bfloat16 parts; set for 2,048 rows of 256 channels (G = 16)."""
    dim = t.shape[4]
    sums = tpu_float32.sums(t) if itemsize == 4 else t.parts
    gained = len(Order.of(t, itemsize == 4).sums_at(t))
    scratch = 4 * t.rows * (t.keys + ((1 + gained) * t.parts + 3) * LANES + sums * max(dim, LANES))
    if itemsize == 4:
        scratch += scratch_bytes(tpu_float32.scratch(t))
    return tiles.vmem_limit(scratch + 4 * itemsize * max(dim, LANES) * (t.rows + t.keys))


def _call(p: Problem, t: Tiles, interpret: Any) -> Any:
    batch, heads, group, _, dim = t.shape
    float32 = p.k.dtype == jnp.float32
    offset = per_row(p.offset, batch, jnp.int32)
    length = per_row(t.count if p.length is None else p.length, batch, jnp.int32)

    def key_block(b, h, i, block, offset, length):
        counted = i * jnp.int32(t.queries) < length[b]
        return b, h, jnp.where(counted, t.key_block(offset[b * group], i, block), 0)

    rows = pl.BlockSpec((None, None, group, t.queries, dim), lambda b, h, i, *_: (b, h, 0, i, 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(batch, heads, t.query_blocks, t.key_steps(offset)),
        in_specs=[rows, t.key_spec(key_block), t.key_spec(key_block)],
        out_specs=[rows, pl.BlockSpec((None, None, group, t.queries), lambda b, h, i, *_: (b, h, 0, i))],
        scratch_shapes=[
            pltpu.VMEM((t.parts, t.rows, Order.of(t, float32).sums_at(t)[-1] + LANES), jnp.float32),
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
        functools.partial(_kernel, t=t, factor=p.scale * LOG2E, soft_cap=p.soft_cap),
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
