"""Pallas Triton kernels for GPUs: both passes read a block of keys once, for all queries that attend to it.

The first pass splits the keys among programs: with the few queries of a window, one program per head would leave most
multiprocessors idle. Its partial sums are merged in XLA. The second has a program for every block of keys, which goes
through the heads of the group and the blocks of queries at or below the diagonal. Keys are the rows of its products and
queries the columns, so that normalisers are along columns, as they are in memory.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels import argument_checks, tuned
from pallas_kernels.attention_mass import xla
from pallas_kernels.attention_mass.mass_problem import Counting, Masses, Problem, log2_normaliser
from pallas_kernels.gpu import chip
from pallas_kernels.gpu.triton_tiles import check_sizes, dot_rows, i32, rows_of, up
from pallas_kernels.softmax import LOG2E, NEG, NOTHING, capped_log2, merge_log
from pallas_kernels.windows import in_window


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes.

    Attributes:
      queries: most rows of queries in a product; a power of two, at least 16.
      keys: keys in a product; a power of two, at least 16.
      split: keys of one program of the first pass, a multiple of ``keys``; None: all.
      warps: warps of a thread block, a power of two. stages: blocks in flight, at least 1.
    """

    queries: int = 64
    keys: int = 128
    split: int | None = None
    warps: int = 4
    stages: int = 2

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for sizes that Triton cannot take."""
        check_sizes(self.queries, self.keys, self.warps, self.stages)
        if self.split is not None and (self.split < 1 or self.split % self.keys):
            raise ValueError(f"split is {self.split}; give a multiple of keys, which is {self.keys}, or None.")

    @classmethod
    def default(cls, p: Problem) -> Config:
        """Sizes that spill no registers when compiled for sm_80, sm_90 and sm_100; not timed on a device."""
        count, dim = p.q.shape[3], p.q.shape[4]
        exact = p.k.dtype == jnp.float32  # without tensor cores: more threads, fewer numbers in each
        queries = 64 >> ((dim > 128) + exact)
        window = count <= 64
        split = 512 if window else None
        keys = 64 if exact or dim > 128 or window else 128
        return cls(min(queries, max(16, pl.next_power_of_2(count))), keys, split, warps=8 if exact else 4)


def log_sum_exp(p: Problem, *, config: Config | None = None, interpret: Any = False) -> Float[Array, "B H G N"]:
    """See :func:`pallas_kernels.attention_mass.log_sum_exp`; kept tokens are handled in XLA."""
    c = _checked("log_sum_exp", p, config)
    batch, heads, group, count, dim = p.q.shape
    tokens = p.k.shape[2]
    # A window's heads are rows of one product; the many queries of a chunk are one product per head.
    flat = count < c.queries
    units, rows = (1, group * count) if flat else (group, count)
    blocks = pl.cdiv(rows, c.queries)
    split = c.split or pl.cdiv(tokens, c.keys) * c.keys
    splits = pl.cdiv(tokens, split)
    kernel = functools.partial(
        _log_sum_exp_kernel, c=c, sizes=(rows, count, tokens, dim, split), blocks=blocks, **_bounds(p)
    )
    parts = pl.pallas_call(
        kernel,
        grid=(splits, units * blocks, batch * heads),
        in_specs=[pl.no_block_spec] * 4,
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct((splits * batch * heads * group * count,), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=c.warps, num_stages=c.stages),
        cost_estimate=_cost(p, 4 * splits * batch * heads * group * count),
        name="log_sum_exp",
        interpret=interpret,
    )(*_per_head(p), p.q.reshape(-1, dim), p.k.reshape(-1, dim))
    parts = parts.reshape(splits, batch, heads, group, count)
    lse = functools.reduce(merge_log, parts) if splits <= 2 else _merged(parts)
    return lse if p.kept is None else merge_log(lse, xla.kept_log_sum_exp(p))


def attention_mass(p: Problem, c: Counting, *, config: Config | None = None, interpret: Any = False) -> Masses:
    """See :func:`pallas_kernels.attention_mass.attention_mass`; kept tokens are handled in XLA."""
    cfg = _checked("attention_mass", p, config)
    batch, heads, group, count, dim = p.q.shape
    tokens = p.k.shape[2]
    weight = jnp.ones((batch, count), jnp.float32) if c.weight is None else c.weight.astype(jnp.float32)
    normaliser = log2_normaliser(c.lse, weight)
    # Blocks after the last query that counts are skipped: batch rows are padded on the right.
    stop = jnp.max(jnp.where(weight > 0, jnp.arange(1, count + 1, dtype=jnp.int32), 0), axis=1)
    onto = jnp.zeros((batch, heads, group, tokens), jnp.float32) if c.onto is None else c.onto.new
    new = pl.pallas_call(
        functools.partial(_mass_kernel, c=cfg, sizes=(heads, group, count, tokens, dim), **_bounds(p)),
        grid=(pl.cdiv(tokens, cfg.keys), heads, batch),
        in_specs=[pl.no_block_spec] * 7,
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct((onto.size,), jnp.float32),
        # Keys that no query attends to are not visited, and keep the masses of ``onto``.
        input_output_aliases={6: 0},
        compiler_params=plt.CompilerParams(num_warps=cfg.warps, num_stages=cfg.stages),
        cost_estimate=_cost(p, 4 * (c.lse.size + 2 * onto.size)),
        name="attention_mass",
        interpret=interpret,
    )(
        p.offset,
        p.scale * jnp.float32(LOG2E),
        stop.astype(jnp.int32),
        p.q.reshape(-1, dim),
        normaliser.reshape(-1),
        p.k.reshape(-1, dim),
        onto.reshape(-1),
    )
    return Masses(new.reshape(onto.shape), None if p.kept is None else xla.kept_mass(p, c))


def _checked(kernel: str, p: Problem, config: Config | None) -> Config:
    argument_checks.compiled_in(p.soft_cap)
    if p.bias is not None:
        raise NotImplementedError("The GPU kernels have no bias by positions (ALiBi).")
    chip.needs_ampere(chip.target())
    if p.q.dtype != p.k.dtype:
        raise NotImplementedError(f"The GPU kernels take queries and keys of one dtype, not {p.q.dtype}, {p.k.dtype}.")
    return config or tuned.config(f"{kernel}.triton", p, Config) or Config.default(p)


def _bounds(p: Problem) -> dict[str, Any]:
    return {"window": p.window, "soft_cap": p.soft_cap}


def _per_head(p: Problem) -> tuple[Array, Array]:
    """Offsets and scales, repeated to [B x H]."""
    heads = p.q.shape[1]
    return jnp.repeat(p.offset, heads), jnp.repeat(p.scale * jnp.float32(LOG2E), heads)


def _cost(p: Problem, other_bytes: int) -> pl.CostEstimate:
    """Cost estimate without causality, as of a prompt's last queries."""
    batch, heads, group, count, dim = p.q.shape
    scores = batch * heads * group * count * p.k.shape[2]
    moved = sum(x.size * x.dtype.itemsize for x in (p.q, p.k)) + other_bytes
    return pl.CostEstimate(flops=(2 * dim + 4) * scores, transcendentals=scores, bytes_accessed=moved)


def _merged(parts: Float[Array, "S B H G N"]) -> Float[Array, "B H G N"]:
    peak = parts.max(axis=0)
    total = jnp.where(parts > NOTHING, jnp.exp(parts - peak), 0.0).sum(axis=0)
    return jnp.where(total > 0, peak + jnp.log(jnp.maximum(total, 1e-37)), NEG)


def _log_sum_exp_kernel(offset, factor, q, k, out, *, c, sizes, blocks, window, soft_cap):
    rows, count, tokens, dim, split = sizes
    part, block, head = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    unit, nth = jax.lax.div(block, i32(blocks)), jax.lax.rem(block, i32(blocks))
    units = pl.num_programs(1) // blocks
    first = offset[head]
    row = nth * i32(c.queries) + jnp.arange(c.queries, dtype=jnp.int32)
    query = jax.lax.rem(row, jnp.full_like(row, count))
    there = row < rows
    at = (head * units + unit) * i32(rows) + row
    qb = rows_of(q, at, there, dim)
    # Past the last key that any of these rows attends to: the last query's, where heads are rows of one product.
    last = jnp.minimum(nth * i32(c.queries) + i32(c.queries), count) if rows == count else i32(count)
    stop = jnp.minimum(jnp.minimum((part + 1) * i32(split), i32(tokens)), first + last)

    def fold(i, carry):
        peak, mass = carry
        key = i * i32(c.keys) + jnp.arange(c.keys, dtype=jnp.int32)
        kb = rows_of(k, head * i32(tokens) + key, key < tokens, dim)
        scores = capped_log2(dot_rows(qb, kb) * factor[head], soft_cap)
        seen = in_window(first + query[:, None], key[None, :], window) & (key[None, :] < stop)
        scores = jnp.where(seen, scores, jnp.float32(NEG))
        higher = jnp.maximum(peak, scores.max(axis=1))
        weight = jnp.where(seen, jnp.exp2(scores - higher[:, None]), jnp.float32(0))
        return higher, mass * jnp.exp2(peak - higher) + weight.sum(axis=1)

    zero = jnp.zeros((c.queries,), jnp.float32)
    begin = jax.lax.div(part * i32(split), i32(c.keys))
    if window is not None:
        earliest = first + (nth * i32(c.queries) if rows == count else i32(0))
        begin = jnp.maximum(begin, jax.lax.div(jnp.maximum(earliest - i32(window - 1), 0), i32(c.keys)))
    peak, mass = jax.lax.fori_loop(begin, up(stop, c.keys), fold, (zero + jnp.float32(NEG), zero))
    found = peak * jnp.float32(1 / LOG2E) + jnp.log(jnp.maximum(mass, jnp.float32(1e-37)))
    found = jnp.where(mass > 0, found, jnp.float32(NEG))
    per_part = pl.num_programs(2) * units * i32(rows)
    plt.store(out.at[part * per_part + at], found, mask=there)


def _mass_kernel(offset, factor, stop, q, normaliser, k, onto, out, *, c, sizes, window, soft_cap):
    del onto  # the same memory as ``out``
    heads, group, count, tokens, dim = sizes
    block, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head = b * i32(heads) + h
    first_key, first_query = block * i32(c.keys), offset[b]
    key = first_key + jnp.arange(c.keys, dtype=jnp.int32)
    end = up(stop[b], c.queries)
    begin = jnp.minimum(jax.lax.div(jnp.maximum(first_key - first_query, 0), i32(c.queries)), end)
    # From this block of queries on, every query attends to all keys of the block.
    below = jnp.clip(up(first_key + i32(c.keys - 1) - first_query, c.queries), begin, end)
    inside = end
    if window is not None:  # up to one block some query sees a key, and up to another all queries see all keys
        end = jnp.clip(up(first_key + i32(c.keys + window - 1) - first_query, c.queries), begin, end)
        below = jnp.minimum(below, end)
        within = jax.lax.div(jnp.maximum(first_key + i32(window) - first_query, 0), i32(c.queries))
        inside = jnp.clip(within, below, end)

    @pl.when(begin < end)
    def _():
        kb = rows_of(k, head * i32(tokens) + key, key < tokens, dim)

        def of_head(g, nothing):
            unit = head * i32(group) + g

            def add(masked, i, total):
                query = i * i32(c.queries) + jnp.arange(c.queries, dtype=jnp.int32)
                row = unit * i32(count) + query
                qb = rows_of(q, row, query < count, dim)
                norm = plt.load(normaliser.at[row], mask=query < count, other=-NEG)
                weight = jnp.exp2(capped_log2(dot_rows(kb, qb) * factor[b], soft_cap) - norm[None, :])
                if masked:
                    seen = in_window(first_query + query[None, :], key[:, None], window)
                    weight = jnp.where(seen, weight, jnp.float32(0))
                return total + weight.sum(axis=1)

            total = jnp.zeros((c.keys,), jnp.float32)
            total = jax.lax.fori_loop(begin, below, functools.partial(add, True), total)
            total = jax.lax.fori_loop(below, inside, functools.partial(add, False), total)
            if window is not None:
                total = jax.lax.fori_loop(inside, end, functools.partial(add, True), total)
            at = unit * i32(tokens) + key
            had = plt.load(out.at[at], mask=key < tokens, other=0.0)
            plt.store(out.at[at], had + total, mask=key < tokens)
            return nothing

        jax.lax.fori_loop(i32(0), i32(group), of_head, i32(0))
