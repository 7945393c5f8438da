"""On TPUs, in Pallas: both passes read every key once, and only up to the diagonal.

* The grid's axis over keys is as long as the furthest query needs, a traced number.
* A query's normaliser travels lane-major, [G, queries], and is turned in the kernel, once a block.
* The queries of a group are one matrix product; the mass is summed a head apart, in 8 sublanes until the last block.
* Masks are compared and selected in blocks that the diagonal crosses only: the vector unit is what limits the mass
  of many queries (a multiply, a subtraction and an addition a score, with ``exp2`` on its own unit).
* The running maximum and sum of the first pass are kept in 128 lanes, and parts of 512 keys, apart and meet in the last
  block: a score is used as it leaves the product, and no block of them is held.
"""

from __future__ import annotations

import functools
from typing import Any

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


def log_sum_exp(p: Problem, *, config: Config | None = None, interpret: Any = False) -> Float[Array, "B H G N"]:
    """See :func:`pallas_kernels.attention_mass.log_sum_exp`; the kept rows' part is XLA's."""
    _check(p)
    lse = _log_sum_exp_call(p, Tiles.of(p.q, p.k, config), interpret)[..., : p.q.shape[3]]
    return lse if p.kept is None else merge_log(lse, xla.kept_log_sum_exp(p))


def attention_mass(p: Problem, c: Counting, *, config: Config | None = None, interpret: Any = False) -> Masses:
    """See :func:`pallas_kernels.attention_mass.attention_mass`; the kept rows' part is XLA's."""
    _check(p)
    t = Tiles.of(p.q, p.k, config)
    tokens = p.k.shape[2]
    onto = jnp.zeros((*p.q.shape[:3], tokens), jnp.float32) if c.onto is None else c.onto.new
    new = _mass_call(p, c, t, tpu_tiles.padded(onto, 3, t.keys), interpret)[..., :tokens]
    return Masses(new, None if p.kept is None else xla.kept_mass(p, c))


def _check(p: Problem) -> None:
    if p.bias is not None:
        raise NotImplementedError("The TPU kernels know no bias that depends on places (ALiBi).")


def _mass_kernel(offset, factor, live, q, normaliser, k, onto, out, total, beside, *, t: Tiles):
    b, block, i = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    first_query, first_key = offset[b] + i * jnp.int32(t.queries), block * jnp.int32(t.keys)

    @pl.when(i == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    def add(masked: bool) -> None:
        column = jnp.transpose(normaliser[...])
        for g in range(q.shape[0]):
            beside[g] = jnp.broadcast_to(column[:, g : g + 1], (t.queries, LANES))
        for part in range(t.parts):
            at = part * t.part
            scores = tpu_tiles.scores(q[...], t.keys_of(k, part), t.columns) * factor[b]
            if masked:
                seen = tpu_tiles.visible(first_query - first_key - jnp.int32(at), t.queries, t.part)
                scores = tpu_tiles.masked_by_head(scores, seen, NEG)
            for g in range(q.shape[0]):
                of_head = tpu_tiles.lanes(scores[g * t.queries : (g + 1) * t.queries])
                for lane, found in enumerate(of_head):
                    share = jnp.exp2(found - beside[g]).reshape(-1, SUBLANES, LANES).sum(axis=0)
                    total[g, :, at + lane * LANES : at + (lane + 1) * LANES] += share

    @pl.when(live[b * pl.num_programs(3) + i] != 0)
    def _():
        tpu_tiles.each_way(t, first_query, first_key, add)

    @pl.when(i == pl.num_programs(3) - 1)
    def _():
        out[...] = onto[...] + total[...].sum(axis=1)


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

    def of_queries(*tail):
        return lambda b, h, block, i, offset, *_: (
            (b, h, 0, jnp.maximum(i, t.first_query_block(offset[b], block)), *tail)
        )

    mass = pl.BlockSpec((None, None, group, t.keys), lambda b, h, block, i, *_: (b, h, 0, block))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(batch, heads, t.key_blocks(p.offset), t.query_blocks),
        in_specs=[
            pl.BlockSpec((None, None, group, t.queries, dim), of_queries(0)),
            pl.BlockSpec((None, None, group, t.queries), of_queries()),
            t.key_spec(lambda b, h, block, *_: (b, h, block)),
            mass,
        ],
        out_specs=mass,
        scratch_shapes=[
            pltpu.VMEM((group, SUBLANES, t.keys), jnp.float32),
            pltpu.VMEM((group, t.queries, LANES), jnp.float32),
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


def _log_sum_exp_kernel(offset, factor, q, k, out, peak, mass, *, t: Tiles):
    b, i, block = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    first_query, first_key = offset[b] + i * jnp.int32(t.queries), block * jnp.int32(t.keys)

    @pl.when(block == 0)
    def _():
        peak[...] = jnp.full_like(peak, jnp.float32(NEG))
        mass[...] = jnp.zeros_like(mass)

    def fold(masked: bool) -> None:
        for part in range(t.parts):
            scores = tpu_tiles.scores(q[...], t.keys_of(k, part), t.columns) * factor[b]
            if masked:
                # Masked weights need no zeros: where a lane has seen no score they are exp2(0), and go with its first.
                ahead = first_query - first_key - jnp.int32(part * t.part)
                scores = tpu_tiles.masked_by_head(scores, tpu_tiles.visible(ahead, t.queries, t.part), NEG)
            groups = tpu_tiles.lanes(scores)
            higher = functools.reduce(jnp.maximum, groups, peak[part])
            gained = functools.reduce(jnp.add, [jnp.exp2(group - higher) for group in groups])
            mass[part] = mass[part] * jnp.exp2(peak[part] - higher) + gained
            peak[part] = higher

    tpu_tiles.each_way(t, first_query, first_key, fold)

    @pl.when(block == pl.num_programs(3) - 1)
    def _():
        top = peak[...].max(axis=0).max(axis=1, keepdims=True)
        total = (mass[...] * jnp.exp2(peak[...] - top)).sum(axis=0).sum(axis=1, keepdims=True)
        found = top * jnp.float32(1 / LOG2E) + jnp.log(jnp.maximum(total, jnp.float32(1e-37)))
        found = jnp.where(top > jnp.float32(NOTHING), found, jnp.float32(NEG))
        tpu_tiles.store_by_head(out, jnp.broadcast_to(found, (t.rows, LANES)))


def _log_sum_exp_call(p: Problem, t: Tiles, interpret: Any) -> Float[Array, "B H G N"]:
    batch, heads, group, _, dim = t.shape

    def key_block(b, h, i, block, offset, *_):
        return b, h, jnp.minimum(block, t.last_key_block(offset[b], i))

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(batch, heads, t.query_blocks, t.key_blocks(p.offset)),
        in_specs=[
            pl.BlockSpec((None, None, group, t.queries, dim), lambda b, h, i, *_: (b, h, 0, i, 0)),
            t.key_spec(key_block),
        ],
        out_specs=pl.BlockSpec((None, None, group, t.queries), lambda b, h, i, *_: (b, h, 0, i)),
        scratch_shapes=[pltpu.VMEM((t.parts, t.rows, LANES), jnp.float32)] * 2,
    )
    out = jax.ShapeDtypeStruct(t.shape[:4], jnp.float32)
    return pl.pallas_call(
        functools.partial(_log_sum_exp_kernel, t=t),
        grid_spec=grid,
        out_shape=out,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        ),
        cost_estimate=t.cost(p.k.dtype.itemsize, 1, 4 * out.size),
        name="log_sum_exp",
        interpret=interpret,
    )(p.offset, p.scale * jnp.float32(LOG2E), t.query_rows(p.q), t.key_rows(p.k))
