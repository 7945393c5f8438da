"""Pallas Triton kernel for NVIDIA GPUs from Ampere on: any head size, rows of 8, 16 and 32 bits.

A thread block reads one item (``split.py``) in blocks of ``config.block`` slots, which Triton pipelines in
``config.stages`` asynchronous copies, and keeps the running softmax of up to 16 queries in registers. JAX has announced
that it will drop this backend: without it this raises ``NotImplementedError``, and XLA's form runs.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels import argument_checks, tuned
from pallas_kernels.gpu import chip
from pallas_kernels.pages import Columns, Lanes, Stacked
from pallas_kernels.ragged_decode import split
from pallas_kernels.ragged_decode.decode_problem import Decoded, Problem
from pallas_kernels.ragged_decode.split import Split
from pallas_kernels.softmax import NEG

try:
    from jax.experimental.pallas import triton as plt
except ImportError:  # a JAX without this backend
    plt: Any = None

# Triton's smallest matrix product is 16 rows; queries are masked up to it.
SMALLEST = 16


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Sizes of the kernel.

    Attributes:
      pages: pages of an item. block: slots read at once, a power of two. warps: warps of a thread block.
      stages: blocks in flight.
    """

    pages: int
    block: int = 64
    warps: int = 4
    stages: int = 3

    def __post_init__(self) -> None:
        if self.pages < 1 or self.block < 16 or self.block & (self.block - 1):
            raise ValueError(f"{self.pages} pages in blocks of {self.block}: Triton needs a power of two from 16 on.")

    @classmethod
    def of(cls, p: Problem) -> TritonConfig:
        """Sizes for a problem and the GPU's shared memory: as many stages as leave space for two thread blocks.

        Raises:
          NotImplementedError: not even two stages of 16 slots fit the GPU's shared memory.
        """
        # Values are as wide as keys or wider.
        itemsize, lanes = p.pages.dtype.itemsize, pl.next_power_of_2(max(p.pages.shape[3], p.pages.key_dim))
        memory, slot = chip.target().shared_memory, 2 * lanes * itemsize
        block = 32 if lanes * itemsize > 256 else 64
        while 2 * block * slot > 0.9 * memory and block > 16:
            block //= 2
        if 2 * block * slot > memory:
            raise NotImplementedError(f"heads of {lanes * itemsize} bytes do not fit {memory} bytes of shared memory.")
        stages = max(min(memory // (2 * block * slot), 3), 2)
        # float32 heads of 256 took more registers than four warps have (compiled for sm_90: 255, and spilled).
        return cls(split.pages_per_item(p), block, 8 if lanes * itemsize > 512 else 4, stages)


def decode(p: Problem, *, config: TritonConfig | None = None, interpret: bool = False) -> Decoded:
    """See :func:`pallas_kernels.ragged_decode.ragged_decode`.

    Raises:
      NotImplementedError: rows by columns, a page size that is not a power of two, a GPU before Ampere, or more
        than 128 queries a head.
    """
    pages = _accepted(p)
    config = config or tuned.config("ragged_decode.triton", p, TritonConfig) or TritonConfig.of(p)
    cut = Split.of(p, config.pages)
    batch, _, group, key_dim = p.q.shape
    total, page_size, dim = pages.shape[1:]
    compute = jnp.promote_types(p.q.dtype, pages.dtype) if pages.dtype.itemsize > 1 else p.q.dtype
    stacked = isinstance(pages, Stacked)
    given = {
        "table": jnp.asarray(cut.table),
        "length": p.length,
        "q": split.queries(p, compute),
        "kv": pages.kv.reshape(-1, pages.kv.shape[-1]),
        "log_mass": p.log_mass,
        "v_scale": None if p.v_scale is None else p.v_scale.reshape(-1),
        "slopes": None if p.slopes is None else jnp.asarray(p.slopes, jnp.float32),
        "position": None if p.position is None or not _reads_positions(p) else p.position.reshape(-1),
        "query_position": p.query_position if _reads_positions(p) else None,
    }
    given = {name: x for name, x in given.items() if x is not None}
    made = {
        "out": jax.ShapeDtypeStruct((batch, cut.items, group, dim), jnp.float32),
        "lse": jax.ShapeDtypeStruct((batch, cut.items, group), jnp.float32),
    }
    if p.with_logits:
        made["logits"] = jax.ShapeDtypeStruct((batch * total, group, page_size), jnp.float32)
    kernel = functools.partial(
        _kernel,
        names=(*given, *made),
        rows=cut.rows,
        runs_pages=total,
        page_size=page_size,
        value_row=page_size if stacked else 0,
        value_lane=0 if stacked else key_dim,
        block=min(config.block, pl.next_power_of_2(cut.rows)),
        scale=p.scale,
        logits_scale=p.scale if p.logits_scale is None else p.logits_scale,
        soft_cap=p.soft_cap,
        window=p.window,
        compute=compute,
    )
    results = pl.pallas_call(
        kernel,
        grid=(cut.items, batch),
        in_specs=[pl.no_block_spec] * len(given),
        out_specs=[pl.no_block_spec] * len(made),
        out_shape=list(made.values()),
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        cost_estimate=split.cost(p),
        interpret=interpret,
        name="ragged_decode_triton",
    )(*given.values())
    out, lse = results[:2]
    logits = results[2].reshape(batch, total, group, page_size) if p.with_logits else None
    return split.merged(p, cut, out, lse, logits)


def _reads_positions(p: Problem) -> bool:
    """Whether the kernel reads positions: for ALiBi, or a window over positions."""
    by_position = p.position is not None and p.query_position is not None
    return by_position and (p.slopes is not None or p.window is not None)


def _accepted(p: Problem) -> Stacked | Lanes:
    """Check that this kernel can do the problem; returns its pages."""
    target = chip.target()
    capability = target.capability
    page_size, group = p.pages.shape[2], p.q.shape[2]
    argument_checks.compiled_in(p.scale, p.logits_scale, p.soft_cap)
    if p.first_row is not None:
        raise NotImplementedError("GPU kernels take queries of all rows of the pages.")
    if plt is None:
        raise NotImplementedError("this JAX has no Pallas Triton backend.")
    if not target.nvidia:
        raise NotImplementedError(f"the Triton kernel was never tried on {target.kind}.")
    if isinstance(p.pages, Columns):
        raise NotImplementedError("Triton reads pages of rows, not keys by column.")
    if page_size & (page_size - 1):
        raise NotImplementedError(f"Triton needs a page size that is a power of two, not {page_size}.")
    if group > 128:
        raise NotImplementedError(f"{group} queries a head do not fit a thread block's registers; 128 do.")
    chip.needs_ampere(target)
    if p.pages.dtype == jnp.float8_e4m3fn and capability is not None and capability < (8, 9):
        raise NotImplementedError("float8_e4m3fn rows need compute capability 8.9.")
    # Pallas counts elements in 32 signed bits up to 2**32 bytes, which one-byte rows would overflow.
    if p.pages.dtype.itemsize == 1 and 2**31 <= p.pages.kv.size <= 2**32:
        raise NotImplementedError("pools of one-byte rows between 2 and 4 GiB are out of Pallas Triton's indices.")
    return p.pages


def _kernel(
    *refs: Any,
    names: tuple[str, ...],
    rows: int,
    runs_pages: int,
    page_size: int,
    value_row: int,
    value_lane: int,
    block: int,
    scale: float,
    logits_scale: float,
    soft_cap: float | None,
    window: int | None,
    compute: Any,
) -> None:
    """Attention over one item's visible slots: ``out``, ``lse``, and the scores if there is a ``logits``."""
    at = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    given = set(names)
    group, key_dim = at.q.shape[2:]
    dim = at.out.shape[3]
    queries, key_lanes, lanes = max(pl.next_power_of_2(group), SMALLEST), *map(pl.next_power_of_2, (key_dim, dim))
    item, row = pl.program_id(0), pl.program_id(1)
    head, page, first_slot = split.at_item(at.table, row, item)
    length = at.length[row, head]
    high = jnp.clip(length - first_slot, 0, rows)
    # A window over slots sets the first slot; one over positions is a mask.
    windowed = window is not None and "position" not in given
    low = jnp.clip(length - jnp.int32(window) - first_slot, 0, rows) if windowed else jnp.int32(0)
    key_lane, lane = (jnp.arange(count, dtype=jnp.int32) for count in (key_lanes, lanes))
    member = jnp.arange(queries, dtype=jnp.int32)
    q_index, q_mask = _grid(member, key_lane), (member < group)[:, None] & (key_lane < key_dim)[None, :]
    q = plt.load(at.q.at[row, head, *q_index], mask=q_mask, other=0.0)
    first_row = (row * runs_pages + page) * page_size
    mass_bias = at.log_mass[row, head] if "log_mass" in given else None
    slopes = None
    if "slopes" in given:
        slopes = plt.load(at.slopes.at[head, member], mask=member < group, other=0.0)

    def keep(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, mass, acc = carry
        slot = step * jnp.int32(block) + jnp.arange(block, dtype=jnp.int32)
        inside = (slot < high) & (slot >= low) if windowed else slot < high
        pool_row = first_row + slot
        kv_row = pool_row + (pool_row & jnp.int32(-page_size)) if value_row else pool_row
        k_mask = inside[:, None] & (key_lane < key_dim)[None, :]
        k = plt.load(at.kv.at[*_grid(kv_row, key_lane)], mask=k_mask, other=_zero(at.kv.dtype))
        raw = _dot(q, k.astype(compute).T)
        distance = None
        if "position" in given:
            position = plt.load(at.position.at[pool_row], mask=inside, other=0)
            distance = position - at.query_position[row]
            if window is not None:
                inside = inside & (distance > jnp.int32(-window))

        def score(by: float) -> Array:
            s = raw * jnp.float32(by)
            if soft_cap is not None:
                s = jnp.float32(soft_cap) * jnp.tanh(s * jnp.float32(1 / soft_cap))
            if slopes is not None and distance is not None:
                s = s + slopes[:, None] * distance.astype(jnp.float32)[None, :]
            if mass_bias is not None:
                s = s + jnp.where(first_slot + slot == 0, mass_bias, jnp.float32(0))[None, :]
            return s

        s = score(scale)
        if "logits" in given:
            logits = s if logits_scale == scale else score(logits_scale)
            page_of, within = pool_row // jnp.int32(page_size), pool_row & jnp.int32(page_size - 1)
            shape = (queries, block)
            index = tuple(jnp.broadcast_to(x, shape) for x in (page_of[None], member[:, None], within[None]))
            plt.store(at.logits.at[*index], logits, mask=(member < group)[:, None] & inside[None, :])
        s = jnp.where(inside[None, :], s, jnp.float32(NEG))
        new_peak = jnp.maximum(peak, s.max(axis=1))
        weight = jnp.exp(s - new_peak[:, None])
        if "position" in given:  # a block without a visible slot has a peak of NEG, and exp(NEG - NEG) is 1
            weight = jnp.where(inside[None, :], weight, jnp.float32(0))
        fade = jnp.exp(peak - new_peak)
        mass = mass * fade + weight.sum(axis=1)
        if "v_scale" in given:
            weight = weight * plt.load(at.v_scale.at[pool_row], mask=inside, other=0.0)[None, :]
        v_index = _grid(kv_row + jnp.int32(value_row), lane + jnp.int32(value_lane))
        v_mask = inside[:, None] & (lane < dim)[None, :]
        v = plt.load(at.kv.at[*v_index], mask=v_mask, other=_zero(at.kv.dtype))
        return new_peak, mass, acc * fade[:, None] + _dot(weight.astype(compute), v.astype(compute))

    start = (
        jnp.full((queries,), NEG, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
        jnp.zeros((queries, lanes), jnp.float32),
    )
    size = jnp.int32(block)
    peak, mass, acc = jax.lax.fori_loop(jax.lax.div(low, size), jax.lax.div(high + (size - 1), size), keep, start)
    held = mass > 0
    lse = jnp.where(held, peak + jnp.log(jnp.where(held, mass, jnp.float32(1))), jnp.float32(NEG))
    plt.store(at.lse.at[row, item, member], lse, mask=member < group)

    @pl.when(high > low)
    def _store() -> None:
        out = acc / jnp.where(held, mass, jnp.float32(1))[:, None]
        plt.store(
            at.out.at[row, item, *_grid(member, lane)], out, mask=(member < group)[:, None] & (lane < dim)[None, :]
        )


def _grid(rows: Array, columns: Array) -> tuple[Array, Array]:
    """Row and column indices broadcast to a matrix."""
    shape = (rows.shape[0], columns.shape[0])
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)


def _dot(a: Array, b: Array) -> Array:
    """Product with float32 sums; float32 operands are not rounded to TF32."""
    return plt.dot(a, b, allow_tf32=False).astype(jnp.float32)


def _zero(dtype: Any) -> Any:
    return np.zeros((), dtype)[()]
