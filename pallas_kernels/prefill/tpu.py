"""On TPUs, in Pallas: flash attention (Dao, arXiv 2307.08691) whose chunk may be anywhere.

The offset is data: JAX's splash attention takes it as part of the mask, a static one, and would be compiled again for
every chunk of a long prompt. The grid's axis over keys is as long as the furthest query needs, a traced number too,
and blocks above the diagonal are neither read nor computed. All G queries of a token share one read of the keys, and
masks are compared in blocks that the diagonal crosses only. The log-sum-exp leaves lane-major.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_tiles
from pallas_kernels.prefill import xla
from pallas_kernels.prefill.problem import Prefilled, Problem
from pallas_kernels.softmax import LOG2E, NEG, NOTHING, merge, per_row
from pallas_kernels.tpu_tiles import LANES, Config, Tiles


def prefill(p: Problem, *, config: Config | None = None, interpret: Any = False) -> Prefilled:
    """See :func:`pallas_kernels.prefill.prefill`; the kept rows' part is XLA's."""
    if p.bias is not None:
        raise NotImplementedError("The TPU kernel knows no bias that depends on places (ALiBi).")
    out, lse = _call(p, Tiles.of(p.q, p.k, config), interpret)
    if p.kept is None:
        return Prefilled(out, lse)
    out, lse = merge(out, lse, *xla.rows_alone(p))
    return Prefilled(out.astype(p.q.dtype), lse)


def _kernel(offset, length, q, k, v, out, lse, peak, mass, total, *, t: Tiles, factor: float):
    b, i, block = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    first = i * jnp.int32(t.queries)
    first_query, first_key = offset[b] + first, block * jnp.int32(t.keys)

    @pl.when(block == 0)
    def _():
        peak[...] = jnp.full_like(peak, jnp.float32(NEG))
        mass[...] = jnp.zeros_like(mass)
        total[...] = jnp.zeros_like(total)

    def fold(masked: bool) -> None:
        scores = tpu_tiles.scores(q[...], k[...], t.columns) * jnp.float32(factor)
        if masked:
            # Masked weights need no zeros: every query sees key 0, so its peak is a score from the first block on.
            seen = tpu_tiles.visible(first_query, first_key, (t.queries, t.keys))
            scores = tpu_tiles.masked_by_head(scores, seen, NEG)
        higher = jnp.maximum(peak[...], scores.max(axis=1, keepdims=True))
        shrink = jnp.exp2(peak[...] - higher)
        weight = jnp.exp2(scores - higher[:, :1])
        # Summed in 128 lanes apart, which meet in the last block.
        gained = functools.reduce(jnp.add, [weight[:, at : at + LANES] for at in range(0, t.keys, LANES)])
        mass[...] = mass[...] * shrink + gained
        total[...] = total[...] * shrink[:, :1] + tpu_tiles.dot(weight, v[...], 1 if t.columns else 0)
        peak[...] = higher

    @pl.when(first < length[b])
    def _():
        tpu_tiles.each_way(first_query, first_key, t.queries, t.keys, fold)

    @pl.when(block == pl.num_programs(3) - 1)
    def _():
        every = jnp.maximum(mass[...].sum(axis=1, keepdims=True), jnp.float32(1e-37))
        out[...] = (total[...] / every).astype(out.dtype).reshape(out.shape)
        top = peak[:, :1]
        found = top * jnp.float32(1 / LOG2E) + jnp.log(every)
        tpu_tiles.store_by_head(lse, jnp.where(top > jnp.float32(NOTHING), found, jnp.float32(NEG)))


def _call(p: Problem, t: Tiles, interpret: Any) -> Any:
    batch, heads, group, _, dim = t.shape
    offset = per_row(p.offset, batch, jnp.int32)
    length = per_row(t.count if p.length is None else p.length, batch, jnp.int32)

    def key_block(b, h, i, block, offset, length):
        last = t.last_key_block(offset[b], i)
        return b, h, jnp.minimum(block, jnp.where(i * jnp.int32(t.queries) < length[b], last, 0))

    rows = pl.BlockSpec((None, None, group, t.queries, dim), lambda b, h, i, *_: (b, h, 0, i, 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(batch, heads, t.query_blocks, t.key_blocks(offset)),
        in_specs=[rows, t.key_spec(key_block), t.key_spec(key_block)],
        out_specs=[rows, pl.BlockSpec((None, None, group, t.queries), lambda b, h, i, *_: (b, h, 0, i))],
        scratch_shapes=[
            pltpu.VMEM((group * t.queries, LANES), jnp.float32),
            pltpu.VMEM((group * t.queries, LANES), jnp.float32),
            pltpu.VMEM((group * t.queries, dim), jnp.float32),
        ],
    )
    out = [jax.ShapeDtypeStruct(t.shape, p.q.dtype), jax.ShapeDtypeStruct(t.shape[:4], jnp.float32)]
    found, lse = pl.pallas_call(
        functools.partial(_kernel, t=t, factor=p.scale * LOG2E),
        grid_spec=grid,
        out_shape=out,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        ),
        cost_estimate=t.cost(p.k.dtype.itemsize, 2, sum(x.size * x.dtype.itemsize for x in out)),
        name="prefill",
        interpret=interpret,
    )(offset, length, t.query_rows(p.q), t.key_rows(p.k), t.key_rows(p.v))
    return found[:, :, :, : t.count], lse[..., : t.count]
