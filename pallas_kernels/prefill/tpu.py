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
    """See :func:`pallas_kernels.prefill.prefill`; kept tokens are attended to in XLA."""
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
    step = _Step.of(offset, length, q, k, v, *scratch, t=t, factor=factor, soft_cap=soft_cap)
    pl.when(step.block == 0)(step.begin)
    step.measure()
    step.lift()
    step.gather()
    tiles.each_strip(t, step.last, functools.partial(step.rows.finish, out), 64)

    @pl.when(step.last)
    def _():
        # As many heads at once as fit the registers.
        for heads in tiles.steps(t.shape[2], max(1, 512 // t.queries)):
            tiles.store_by_head(lse.at[heads], step.rows.shrink[heads.start * t.queries : heads.stop * t.queries])


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step of the grid: a block of queries and a block of keys. Built by :meth:`of`.

    Attributes:
      q, k, v: the blocks. offset: of each head's first query in the prompt; the row's heads from ``first_head`` on.
      factor: scale of the scores, to units of log 2. soft_cap: of the scores.
      block: the step's number among those of its queries. last: whether no other follows.
      first: first query of the block. first_query, first_key: the blocks' places in the prompt.
      counted: whether any of the queries is within its row's length. live: whether any also attends to these keys.
      rows: softmax of the queries. float32: bfloat16 parts of float32 blocks; None for 16-bit ones.
    """

    t: Tiles
    q: Any
    k: Any
    v: Any
    offset: Any
    first_head: Any
    factor: float
    soft_cap: float | None
    block: Any
    last: Any
    first: Any
    first_query: Any
    first_key: Any
    counted: Any
    live: Any
    rows: Block
    float32: Any

    @classmethod
    def of(cls, offset, length, q, k, v, *scratch, t: Tiles, factor, soft_cap) -> _Step:
        score, found_peak, peak, shrink, mass, total, *parts = scratch
        b, i, block = pl.program_id(0), pl.program_id(2), pl.program_id(3)
        group = t.shape[2]
        first = i * jnp.int32(t.queries)
        first_query = offset[b * group] + first
        first_key = (t.first_key_block(first_query) + block) * jnp.int32(t.keys)
        counted, last = first < length[b], block == pl.num_programs(3) - 1
        float32: Any = tpu_float32.Blocks(t, *parts) if parts else None
        order = Order.of(t, float32 is not None)
        bases = [jnp.minimum(length[b] + jnp.int32(x), 0) for x in range(2)] if order.follow else [0, 0]
        return cls(
            t=t,
            q=q,
            k=k,
            v=v,
            offset=offset,
            first_head=b * group,
            factor=factor,
            soft_cap=soft_cap,
            block=block,
            last=last,
            first=first,
            first_query=first_query,
            first_key=first_key,
            counted=counted,
            live=jnp.logical_and(counted, t.touched(first_query, first_key)),
            rows=Block(t, order, bases, score, found_peak, peak, shrink, mass, total),
            float32=float32,
        )

    def begin(self) -> None:
        """Start with the first block of keys."""
        self.rows.clear()
        if self.float32:
            self.float32.take_queries(self.q, jnp.float32(self.factor))

    def measure(self) -> None:
        """Compute the scores, capped and masked, and the largest of them."""
        t, live = self.t, self.live
        if self.float32:
            pl.when(live)(functools.partial(self.float32.take_keys, self.k))
            pl.when(live)(functools.partial(self.float32.take_values, self.v))
            for chunk in self.float32.first_chunks():
                tiles.scheduling_barrier(live, functools.partial(self.float32.add_scores, self.rows.score, chunk))
        pl.when(self.counted)(lambda: tiles.masked_or_not(t, self.first_query, self.first_key, self._score))
        whole = t.whole(self.first_query, self.first_key)
        for masked, there in ((False, whole), (True, jnp.logical_not(whole))):
            for part in range(t.parts if self._bounds_later(masked) else 0):
                tiles.each_strip(t, jnp.logical_and(live, there), functools.partial(self._bound, masked, part), 64)

    def lift(self) -> None:
        """Raise the peaks to the scores."""
        t = self.t
        for strip in strips(t) if self.rows.order.follow else [slice(0, t.rows)]:
            tiles.scheduling_barrier(self.live, functools.partial(self.rows.lift, strip))

    def gather(self) -> None:
        """Add the weighted values."""
        if self.float32:
            tiles.each_strip(self.t, self.live, self._cut_weights, 64)
            pl.when(self.live)(functools.partial(self.float32.gather, self.rows.total, self.rows.shrink))
            return
        *others, rest = strips(self.t)
        for strip in others:
            tiles.scheduling_barrier(self.live, functools.partial(self.rows.gather, self.v, strip))
        pl.when(self.live)(functools.partial(self.rows.gather, self.v, rest))

    def _bounds_later(self, masked: bool) -> bool:
        """Whether scores are stored before they are capped and masked: as they leave the matrix units, they spill."""
        return self.soft_cap is not None or (masked and self.t.window is not None)

    def _score(self, masked: bool) -> None:
        t = self.t
        for part in range(t.parts):
            if self.float32:
                scores = self.float32.last_scores(self.rows.score, part)
            else:
                scores = tiles.scores(self.q[...], t.keys_of(self.k, part), t.columns) * jnp.float32(self.factor)
            if self._bounds_later(masked):
                self.rows.score[part, :, : t.part] = scores
                continue
            if masked:
                # Masked weights need no zeros: a query's first real peak removes them, its own key's at the latest, and
                # one without any key attends to nothing, which ``finish`` handles. Each head compares with its own
                # copy of the offset: the compiler would keep the masks of one head for the next.
                ahead = [self._ahead(g) - jnp.int32(part * t.part) for g in range(t.shape[2])]
                scores = tiles.masked(scores, ahead)
            self.rows.take(part, scores)

    def _bound(self, masked: bool, part: int, head: Any, queries: Any, strip: Any) -> None:
        """Cap and mask a few rows of stored scores."""
        scores = capped_log2(self.rows.score[part, strip, : self.t.part], self.soft_cap)
        if masked:
            ahead = self._ahead(head) + queries.start - jnp.int32(part * self.t.part)
            scores = tiles.masked(scores, [ahead], self.t.window)
        self.rows.take(part, scores, strip)

    def _ahead(self, head: Any) -> Any:
        """How far a head's first query is ahead of the first key."""
        return self.offset[self.first_head + head] + self.first - self.first_key

    def _cut_weights(self, _: Any, __: Any, strip: Any) -> None:
        """Compute the weights of a few rows and store their bfloat16 parts."""
        for part in range(self.t.parts):
            weights = self.rows.weights_of(part, strip, slice(0, self.t.part))
            self.float32.take_weights(part, strip, weights)


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
