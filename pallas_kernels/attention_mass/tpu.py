"""On TPUs, in Pallas: both passes read every key once, and only up to the diagonal.

* The grid's axis over keys is as long as the furthest query needs, a traced number: a chunk's place changes no shape.
* The normaliser of a query is one number a row, which as [..., 1] would be padded to 128 lanes in memory (134 MB for
  a million of them). It travels lane-major, [G, queries], and is turned in the kernel, once a block.
* The queries of a group are one matrix product; the mass is summed a head apart, in 8 sublanes until the last block.
* Masks are compared and selected in blocks that the diagonal crosses only: the vector unit is what limits the mass
  of many queries (a multiply, a subtraction and an addition a score, with ``exp2`` on its own unit).
* Keys of a head size below 128 lanes are taken transposed, tokens along the lanes. As rows they would be padded to
  twice their bytes or more, and an array that is not would be copied (268 MB of temporary memory for 134 MB of keys
  of size 64, compiled for v5e); XLA lays such arrays out with the longer axis along the lanes by itself.
* The running maximum and sum of the first pass are kept in 128 lanes apart and meet in the last block.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.attention_mass import xla
from pallas_kernels.attention_mass.problem import Counting, Masses, Problem
from pallas_kernels.softmax import LOG2E, NEG, NOTHING, merge_log

_LANES, _SUBLANES = 128, 8


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes.

    Attributes:
      queries: of each head a block holds at most; a multiple of 128.
      keys: a block holds at most; a power of two, at least 128.
    """

    queries: int = 128
    keys: int = 1024

    @classmethod
    def default(cls, group: int, count: int) -> Config:
        """About 512 rows of queries against 1,024 keys, 2 MB of scores; a window's few rows against up to 2,048 keys.

        Not timed on a device. Scheduled for v5e, a window of 32 queries of 4 heads takes 0.53 us of issue slots for
        2,048 keys, whose bytes take 0.64: one read of the keys is what it costs.
        """
        queries = _LANES * max(1, 4 // group)
        rows = min(count, queries) * group
        return cls(queries, min(2048, max(256, 1 << ((512 * 1024) // rows).bit_length() - 1)))


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """A problem cut into blocks; ``queries`` and ``keys`` divide the padded axes."""

    p: Problem
    queries: int
    keys: int
    columns: bool

    @classmethod
    def of(cls, p: Problem, config: Config | None) -> _Tiles:
        if p.bias is not None:
            raise NotImplementedError("The TPU kernels know no bias that depends on places (ALiBi).")
        _, _, group, count, _ = p.q.shape
        config = config or Config.default(group, count)
        queries = min(config.queries, -(-count // 16) * 16)
        keys = config.keys
        while keys > _LANES and p.k.shape[2] % keys:
            keys //= 2
        q = _padded(p.q, 3, queries)
        columns = p.k.shape[3] % _LANES != 0
        return cls(dataclasses.replace(p, q=q, k=_padded(p.k, 2, keys)), queries, keys, columns)

    @property
    def stored_keys(self) -> Array:
        """The keys as the kernels take them."""
        return self.p.k.swapaxes(2, 3) if self.columns else self.p.k

    def key_spec(self, block_of: Any) -> pl.BlockSpec:
        """Of a block of keys; ``block_of`` gives (row, head, block) from the grid's indices."""
        dim = self.p.k.shape[3]
        if not self.columns:
            return pl.BlockSpec((None, None, self.keys, dim), lambda *at: (*block_of(*at), 0))

        def index(*at: Any) -> Any:
            b, h, block = block_of(*at)
            return b, h, 0, block

        return pl.BlockSpec((None, None, dim, self.keys), index)

    @property
    def query_blocks(self) -> int:
        return self.p.q.shape[3] // self.queries

    def key_blocks(self, count: int) -> Array:
        """Blocks of keys that some query sees, at least 1; traced. ``count`` queries were asked for."""
        last = jnp.max(self.p.offset) + jnp.int32(count - 1)
        return jnp.clip(last // jnp.int32(self.keys) + 1, 1, self.p.k.shape[2] // self.keys)

    def cost(self, reads: int, writes: int) -> pl.CostEstimate:
        """Of half the rectangle, as if the queries were the last."""
        batch, heads, group, count, dim = self.p.q.shape
        scores = batch * heads * group * count * self.p.k.shape[2]
        moved = sum(x.size * x.dtype.itemsize for x in (self.p.q, self.p.k)) + 4 * (reads + writes)
        return pl.CostEstimate(flops=(2 * dim + 4) * scores, transcendentals=scores, bytes_accessed=moved)


def log_sum_exp(p: Problem, *, config: Config | None = None, interpret: Any = False) -> Float[Array, "B H G N"]:
    """See :func:`pallas_kernels.attention_mass.log_sum_exp`; the kept rows' part is XLA's."""
    count = p.q.shape[3]
    t = _Tiles.of(p, config)
    lse = _log_sum_exp_call(t, count, interpret)[..., :count]
    return lse if p.kept is None else merge_log(lse, xla.kept_log_sum_exp(p))


def attention_mass(p: Problem, c: Counting, *, config: Config | None = None, interpret: Any = False) -> Masses:
    """See :func:`pallas_kernels.attention_mass.attention_mass`; the kept rows' part is XLA's."""
    t = _Tiles.of(p, config)
    batch, heads, group, _, _ = p.q.shape
    tokens = p.k.shape[2]
    onto = jnp.zeros((batch, heads, group, tokens), jnp.float32) if c.onto is None else c.onto.new
    new = _mass_call(t, c, p.q.shape[3], _padded(onto, 3, t.keys), interpret)[..., :tokens]
    return Masses(new, None if p.kept is None else xla.kept_mass(p, c))


def _padded(x: Array, axis: int, size: int) -> Array:
    """With zeros up to whole blocks; nothing where it is whole already."""
    fill = -x.shape[axis] % size
    if not fill:
        return x
    return jnp.pad(x, [(0, fill if i == axis else 0) for i in range(x.ndim)])


def _scores(q: Array, k: Array, columns: bool) -> Float[Array, "M S"]:
    """q . k of a block, [G, N, D] x [S, D] or [D, S]; float32 keys are multiplied as such, not in bfloat16 passes."""
    exact = jax.lax.Precision.HIGHEST if k.dtype == jnp.float32 else None
    rows = q.reshape(-1, q.shape[-1]).astype(k.dtype)
    axes = (((1,), (0 if columns else 1,)), ((), ()))
    return jax.lax.dot_general(rows, k, axes, precision=exact, preferred_element_type=jnp.float32)


def _visible(first_query: Array, first_key: Array, shape: tuple[int, int]) -> Array:
    """Of one head's queries [N] and keys [S] from these places on."""
    query = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    key = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return key - query <= first_query - first_key


def _each_way(first_query: Array, first_key: Array, queries: int, keys: int, run: Any) -> None:
    """``run(masked)`` for a block the diagonal crosses or one below it; nothing for one above."""
    below = first_query >= first_key + jnp.int32(keys - 1)
    touched = first_query + jnp.int32(queries - 1) >= first_key
    pl.when(below)(lambda: run(False))
    pl.when(jnp.logical_and(touched, jnp.logical_not(below)))(lambda: run(True))


def _mass_kernel(offset, factor, live, q, lse, k, onto, out, total, *, queries, keys, columns):
    b, block, i = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    group = q.shape[0]
    first_query, first_key = offset[b] + i * jnp.int32(queries), block * jnp.int32(keys)

    @pl.when(i == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    def add(masked: bool) -> None:
        scores = _scores(q[...], k[...], columns) * factor[b]
        normaliser = jnp.transpose(lse[...])
        for g in range(group):
            share = jnp.exp2(scores[g * queries : (g + 1) * queries] - normaliser[:, g : g + 1])
            if masked:
                share = jnp.where(_visible(first_query, first_key, share.shape), share, jnp.float32(0))
            total[g] += share.reshape(-1, _SUBLANES, keys).sum(axis=0)

    @pl.when(live[b * pl.num_programs(3) + i] != 0)
    def _():
        _each_way(first_query, first_key, queries, keys, add)

    @pl.when(i == pl.num_programs(3) - 1)
    def _():
        out[...] = onto[...] + total[...].sum(axis=1)


def _mass_call(t: _Tiles, c: Counting, count: int, onto: Array, interpret: Any) -> Float[Array, "B H G T"]:
    batch, heads, group, padded, dim = t.p.q.shape
    queries, keys, blocks = t.queries, t.keys, t.query_blocks
    weight = jnp.ones((batch, count), jnp.float32) if c.weight is None else c.weight
    weight = _padded(weight.astype(jnp.float32), 1, queries)
    live = (weight > 0).reshape(batch * blocks, queries).any(axis=1).astype(jnp.int32)
    # A weight is the normaliser's business: w exp(s - lse) = exp(s - (lse - log w)), and one of 0 makes it infinite.
    log_weight = jnp.log(jnp.maximum(weight, jnp.finfo(jnp.float32).tiny))[:, None, None]
    lse = _padded(c.lse, 3, queries)
    counts = (weight[:, None, None] > 0) & (lse > NOTHING)
    normaliser = jnp.where(counts, (lse - log_weight) * jnp.float32(LOG2E), jnp.float32(-NEG))

    def query_block(b, block, i, offset):
        # Queries before the block's keys are not read.
        first = jax.lax.div(jnp.maximum(block * jnp.int32(keys) - offset[b], 0), jnp.int32(queries))
        return jnp.maximum(i, jnp.minimum(first, jnp.int32(blocks - 1)))

    def of_queries(*tail):
        return lambda b, h, block, i, offset, *_: (b, h, 0, query_block(b, block, i, offset), *tail)

    mass = pl.BlockSpec((None, None, group, keys), lambda b, h, block, i, *_: (b, h, 0, block))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(batch, heads, t.key_blocks(count), blocks),
        in_specs=[
            pl.BlockSpec((None, None, group, queries, dim), of_queries(0)),
            pl.BlockSpec((None, None, group, queries), of_queries()),
            t.key_spec(lambda b, h, block, *_: (b, h, block)),
            mass,
        ],
        out_specs=mass,
        scratch_shapes=[pltpu.VMEM((group, _SUBLANES, keys), jnp.float32)],
    )
    return pl.pallas_call(
        functools.partial(_mass_kernel, queries=queries, keys=keys, columns=t.columns),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct(onto.shape, jnp.float32),
        # Blocks of keys beyond the last query are not visited and keep what they had.
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        ),
        cost_estimate=t.cost(normaliser.size + onto.size, onto.size),
        name="attention_mass",
        interpret=interpret,
    )(t.p.offset, t.p.scale * jnp.float32(LOG2E), live, t.p.q, normaliser, t.stored_keys, onto)


def _log_sum_exp_kernel(offset, factor, q, k, out, peak, mass, *, queries, keys, columns):
    b, i, block = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    group = q.shape[0]
    first_query, first_key = offset[b] + i * jnp.int32(queries), block * jnp.int32(keys)

    @pl.when(block == 0)
    def _():
        peak[...] = jnp.full_like(peak, jnp.float32(NEG))
        mass[...] = jnp.zeros_like(mass)

    def fold(masked: bool) -> None:
        scores = _scores(q[...], k[...], columns) * factor[b]
        if masked:
            # Masked weights need no zeros: where a lane has seen no score they are exp2(0), and go with its first.
            seen = _visible(first_query, first_key, (queries, keys))
            heads = [scores[g * queries : (g + 1) * queries] for g in range(group)]
            scores = jnp.concatenate([jnp.where(seen, x, jnp.float32(NEG)) for x in heads])
        parts = [scores[:, at : at + _LANES] for at in range(0, keys, _LANES)]
        higher = functools.reduce(jnp.maximum, parts, peak[...])
        gained = functools.reduce(jnp.add, [jnp.exp2(part - higher) for part in parts])
        mass[...] = mass[...] * jnp.exp2(peak[...] - higher) + gained
        peak[...] = higher

    _each_way(first_query, first_key, queries, keys, fold)

    @pl.when(block == pl.num_programs(3) - 1)
    def _():
        top = peak[...].max(axis=1, keepdims=True)
        total = (mass[...] * jnp.exp2(peak[...] - top)).sum(axis=1, keepdims=True)
        found = top * jnp.float32(1 / LOG2E) + jnp.log(jnp.maximum(total, jnp.float32(1e-37)))
        found = jnp.where(top > jnp.float32(NOTHING), found, jnp.float32(NEG))
        turned = jnp.transpose(jnp.broadcast_to(found, (group * queries, _LANES)))
        for g in range(group):
            out[g : g + 1] = turned[:1, g * queries : (g + 1) * queries]


def _log_sum_exp_call(t: _Tiles, count: int, interpret: Any) -> Float[Array, "B H G N"]:
    batch, heads, group, padded, dim = t.p.q.shape
    queries, keys = t.queries, t.keys

    def key_block(b, h, i, block, offset, *_):
        # Keys after the block's queries are not read.
        last = jnp.maximum(offset[b] + (i + 1) * jnp.int32(queries) - 1, 0)
        return b, h, jnp.minimum(block, jax.lax.div(last, jnp.int32(keys)))

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(batch, heads, t.query_blocks, t.key_blocks(count)),
        in_specs=[
            pl.BlockSpec((None, None, group, queries, dim), lambda b, h, i, block, *_: (b, h, 0, i, 0)),
            t.key_spec(key_block),
        ],
        out_specs=pl.BlockSpec((None, None, group, queries), lambda b, h, i, block, *_: (b, h, 0, i)),
        scratch_shapes=[pltpu.VMEM((group * queries, _LANES), jnp.float32)] * 2,
    )
    return pl.pallas_call(
        functools.partial(_log_sum_exp_kernel, queries=queries, keys=keys, columns=t.columns),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct((batch, heads, group, padded), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        ),
        cost_estimate=t.cost(0, batch * heads * group * padded),
        name="log_sum_exp",
        interpret=interpret,
    )(t.p.offset, t.p.scale * jnp.float32(LOG2E), t.p.q, t.stored_keys)
