"""Pallas Triton kernel for GPUs: flash attention (Dao, arXiv 2307.08691) of a chunk at any offset in the prompt.

cuDNN, through ``jax.nn.dot_product_attention``, is faster where it fits, but its causal mask starts at key 0: a later
chunk would take two calls, over the earlier keys and over its own, merged by log-sum-exp, and JAX 0.10.2 to 0.12 round
that residual to the output's dtype. In bfloat16 a log-sum-exp of 8 is then wrong by up to 0.03, and a merged part, or a
mass computed from it, by 3 %. Its [B, T, H, D] order would also copy keys and values, and it takes no float32.

A program computes a block of one head's queries; the last blocks start first, as they have the most keys to read.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import argument_checks, tuned
from pallas_kernels.gpu import chip
from pallas_kernels.gpu.triton_tiles import check_sizes, dot, dot_rows, i32, lanes, rows_of, up
from pallas_kernels.prefill import xla
from pallas_kernels.prefill.prefill_problem import Prefilled, Problem
from pallas_kernels.softmax import LOG2E, NEG, NOTHING, capped_log2, per_row
from pallas_kernels.windows import in_window


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes.

    Attributes:
      queries, keys: sizes of a block; powers of two, at least 16.
      warps: warps of a thread block, a power of two. stages: blocks in flight, at least 1.
    """

    queries: int = 128
    keys: int = 64
    warps: int = 8
    stages: int = 2

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for sizes that Triton cannot take."""
        check_sizes(self.queries, self.keys, self.warps, self.stages)

    @classmethod
    def default(cls, p: Problem) -> Config:
        """Sizes that spill no registers when compiled for sm_80, sm_90 and sm_100; not timed on a device."""
        count, dim = p.q.shape[3:]
        queries, keys, warps, stages = 128, 64, 8, 3
        if p.k.dtype == jnp.float32:  # without tensor cores
            queries, keys, stages = (32 if dim <= 64 else 16), 32, 2
        elif dim > 128:
            queries, keys, stages = 64, 32, 2
        return cls(min(queries, max(16, pl.next_power_of_2(count))), keys, warps, stages)


def prefill(p: Problem, *, config: Config | None = None, interpret: Any = False) -> Prefilled:
    """See :func:`pallas_kernels.prefill.prefill`; kept tokens are attended to in XLA."""
    if p.bias is not None:
        raise NotImplementedError("The GPU kernel has no bias by positions (ALiBi).")
    argument_checks.compiled_in(p.scale, p.soft_cap)
    chip.needs_ampere(chip.target())
    if not p.q.dtype == p.k.dtype == p.v.dtype:
        raise NotImplementedError(f"The GPU kernel takes one dtype, not {p.q.dtype}, {p.k.dtype}, {p.v.dtype}.")
    config = config or tuned.config("prefill.triton", p, Config) or Config.default(p)
    return xla.with_kept_rows(p, *_call(p, config, interpret))


def _call(p: Problem, c: Config, interpret: Any) -> Any:
    batch, heads, group, count, dim = p.q.shape
    tokens = p.k.shape[2]
    blocks = pl.cdiv(count, c.queries)
    scores = batch * heads * group * count * tokens
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            c=c,
            sizes=(heads, group, count, tokens, dim),
            factor=p.scale * LOG2E,
            soft_cap=p.soft_cap,
            window=p.window,
        ),
        # Consecutive programs read the same head's keys.
        grid=(group * blocks, heads, batch),
        in_specs=[pl.no_block_spec] * 5,
        out_specs=[pl.no_block_spec] * 2,
        out_shape=[
            jax.ShapeDtypeStruct((batch * heads * group * count, dim), p.q.dtype),
            jax.ShapeDtypeStruct((batch * heads * group * count,), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=c.warps, num_stages=c.stages),
        cost_estimate=pl.CostEstimate(
            flops=(4 * dim + 4) * scores,
            transcendentals=scores,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (p.q, p.q, p.k, p.v)),
        ),
        name="prefill",
        interpret=interpret,
    )(
        per_row(p.offset, batch, jnp.int32),
        per_row(count if p.length is None else p.length, batch, jnp.int32),
        *(x.reshape(-1, dim) for x in (p.q, p.k, p.v)),
    )
    return out.reshape(p.q.shape), lse.reshape(p.q.shape[:4])


def _kernel(offset, length, q, k, v, out, lse, *, c, sizes, factor, soft_cap, window):
    heads, group, count, tokens, dim = sizes
    nth, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head = b * i32(heads) + h
    g = jax.lax.rem(nth, i32(group))
    first = (i32(pl.cdiv(count, c.queries) - 1) - jax.lax.div(nth, i32(group))) * i32(c.queries)
    first_query = offset[b] + first
    row = first + jnp.arange(c.queries, dtype=jnp.int32)
    there = row < count
    at = (head * i32(group) + g) * i32(count) + row
    qb = rows_of(q, at, there, dim)
    stop = jnp.minimum(first_query + i32(c.queries), i32(tokens))
    stop = jnp.where(first < length[b], up(stop, c.keys), i32(0))
    # Before this block of keys every query attends to all keys.
    below = jnp.minimum(jax.lax.div(jnp.maximum(first_query + i32(1), 0), i32(c.keys)), stop)
    begin = inside = i32(0)
    if window is not None:  # from one block on some query sees a key, and from another on all queries see all keys
        begin = jnp.minimum(jax.lax.div(jnp.maximum(first_query - i32(window - 1), 0), i32(c.keys)), stop)
        below = jnp.maximum(below, begin)
        inside = jnp.clip(up(first_query + i32(c.queries - window), c.keys), begin, below)

    def fold(masked, i, carry):
        peak, mass, total = carry
        key = i * i32(c.keys) + jnp.arange(c.keys, dtype=jnp.int32)
        inside = key < tokens
        scores = dot_rows(qb, rows_of(k, head * i32(tokens) + key, inside, dim)) * jnp.float32(factor)
        scores = capped_log2(scores, soft_cap)
        if masked:
            seen = in_window(offset[b] + row[:, None], key[None, :], window)
            scores = jnp.where(seen, scores, jnp.float32(NEG))
        higher = jnp.maximum(peak, scores.max(axis=1))
        # Masked weights need no zeros: a query's first real peak removes them, its own key's at the latest, and one
        # without any key attends to nothing, which is handled after the loops.
        weight = jnp.exp2(scores - higher[:, None])
        shrink = jnp.exp2(peak - higher)
        vb = rows_of(v, head * i32(tokens) + key, inside, dim)
        gained = dot(weight.astype(vb.dtype), vb)
        return higher, mass * shrink + weight.sum(axis=1), total * shrink[:, None] + gained

    zero = jnp.zeros((c.queries,), jnp.float32)
    lane = lanes(c.queries, dim)
    carry = (zero + jnp.float32(NEG), zero, jnp.zeros(lane.shape, jnp.float32))
    if window is not None:
        carry = jax.lax.fori_loop(begin, inside, functools.partial(fold, True), carry)
    carry = jax.lax.fori_loop(inside, below, functools.partial(fold, False), carry)
    peak, mass, total = jax.lax.fori_loop(below, stop, functools.partial(fold, True), carry)
    some = jnp.maximum(mass, jnp.float32(1e-37))
    seen = peak > jnp.float32(NOTHING)
    found = peak * jnp.float32(1 / LOG2E) + jnp.log(some)
    plt.store(lse.at[at], jnp.where(seen, found, jnp.float32(NEG)), mask=there)
    some = jnp.where(seen, some, jnp.float32(jnp.inf))
    place = jnp.broadcast_to(at[:, None], lane.shape)
    plt.store(out.at[place, lane], (total / some[:, None]).astype(out.dtype), mask=there[:, None] & (lane < dim))
