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
from pallas_kernels.softmax import NEG, capped

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
    static = _Static(
        rows=cut.rows,
        block=min(config.block, pl.next_power_of_2(cut.rows)),
        runs_pages=total,
        page_size=page_size,
        value_row=page_size if stacked else 0,
        value_lane=0 if stacked else key_dim,
        scale=p.scale,
        logits_scale=p.scale if p.logits_scale is None else p.logits_scale,
        soft_cap=p.soft_cap,
        window=p.window,
        compute=compute,
    )
    results = pl.pallas_call(
        functools.partial(_kernel, names=(*given, *made), static=static),
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


@dataclasses.dataclass(frozen=True)
class _Static:
    """The static parameters of the kernel.

    Attributes:
      rows: slots of an item. block: slots read at once.
      runs_pages: pages of a batch row; of ``page_size`` slots.
      value_row, value_lane: where a slot's value is, from its key on.
      compute: dtype of the products' operands.
    """

    rows: int
    block: int
    runs_pages: int
    page_size: int
    value_row: int
    value_lane: int
    scale: float
    logits_scale: float
    soft_cap: float | None
    window: int | None
    compute: Any


def _kernel(*refs: Any, names: tuple[str, ...], static: _Static) -> None:
    """Attention over one item's visible slots: ``out``, ``lse``, and the scores if there is a ``logits``."""
    item = _Item.of(SimpleNamespace(**dict(zip(names, refs, strict=True))), static)
    size = jnp.int32(static.block)
    start = (
        jnp.full((item.queries,), NEG, jnp.float32),
        jnp.zeros((item.queries,), jnp.float32),
        jnp.zeros((item.queries, item.lane.size), jnp.float32),
    )
    first, end = jax.lax.div(item.low, size), jax.lax.div(item.high + (size - 1), size)
    item.store(*jax.lax.fori_loop(first, end, item.keep, start))


@dataclasses.dataclass(frozen=True)
class _Item:
    """The item that a thread block reads: its place, visible slots and queries. Built by :meth:`of`.

    Attributes:
      at: references by name; which there are says what is asked of the kernel. static: see there.
      row, item: place in the grid. first_slot: of the item in its head. first_row: of the item in the pool.
      low, high: first and end of its visible slots.
      member, key_lane, lane: indices of queries, channels of keys and of values, each up to a power of two.
      q: queries. mass_bias: of the head's first slot, slopes: of ALiBi; None without.
    """

    at: Any
    static: _Static
    row: Array
    item: Array
    first_slot: Array
    first_row: Array
    low: Array
    high: Array
    member: Array
    key_lane: Array
    lane: Array
    q: Array
    mass_bias: Array | None
    slopes: Array | None

    @classmethod
    def of(cls, at: Any, static: _Static) -> _Item:
        """Read what the whole item shares."""
        group, key_dim = at.q.shape[2:]
        sizes = max(pl.next_power_of_2(group), SMALLEST), *map(pl.next_power_of_2, (key_dim, at.out.shape[3]))
        member, key_lane, lane = (jnp.arange(size, dtype=jnp.int32) for size in sizes)
        item, row = pl.program_id(0), pl.program_id(1)
        head, page, first_slot = split.at_item(at.table, row, item)
        # A window over slots sets the first slot; one over positions is a mask.
        over_slots = None if hasattr(at, "position") else static.window
        low, high = split.visible(at.length[row, head], first_slot, static.rows, over_slots)
        real = member < group
        q_mask = real[:, None] & (key_lane < key_dim)[None, :]
        q = plt.load(at.q.at[row, head, *_grid(member, key_lane)], mask=q_mask, other=0.0)
        return cls(
            at=at,
            static=static,
            row=row,
            item=item,
            first_slot=first_slot,
            first_row=(row * static.runs_pages + page) * static.page_size,
            low=low,
            high=high,
            member=member,
            key_lane=key_lane,
            lane=lane,
            q=q,
            mass_bias=at.log_mass[row, head] if hasattr(at, "log_mass") else None,
            slopes=plt.load(at.slopes.at[head, member], mask=real, other=0.0) if hasattr(at, "slopes") else None,
        )

    @property
    def queries(self) -> int:
        """Queries with those that fill a product's rows."""
        return self.member.size

    @property
    def real(self) -> Array:
        """Which queries are a head's own."""
        return self.member < self.at.q.shape[2]

    def keep(self, step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Add a block of slots to the running softmax: its peak, mass and sum of values."""
        peak, mass, acc = carry
        at, static = self.at, self.static
        slot = step * jnp.int32(static.block) + jnp.arange(static.block, dtype=jnp.int32)
        inside = slot < self.high
        if static.window is not None and not hasattr(at, "position"):
            inside = inside & (slot >= self.low)
        pool_row = self.first_row + slot
        kv_row = pool_row + (pool_row & jnp.int32(-static.page_size)) if static.value_row else pool_row
        k = self._load(kv_row, self.key_lane, at.q.shape[3], inside)
        raw = _dot(self.q, k.astype(static.compute).T)
        distance = None
        if hasattr(at, "position"):
            position = plt.load(at.position.at[pool_row], mask=inside, other=0)
            distance = position - at.query_position[self.row]
            if static.window is not None:
                inside = inside & (distance > jnp.int32(-static.window))
        s = self._scores(raw, static.scale, slot, distance)
        if hasattr(at, "logits"):
            same = static.logits_scale == static.scale
            logits = s if same else self._scores(raw, static.logits_scale, slot, distance)
            self._store_logits(logits, pool_row, inside)
        s = jnp.where(inside[None, :], s, jnp.float32(NEG))
        new_peak = jnp.maximum(peak, s.max(axis=1))
        weight = jnp.exp(s - new_peak[:, None])
        if hasattr(at, "position"):  # a block without a visible slot has a peak of NEG, and exp(NEG - NEG) is 1
            weight = jnp.where(inside[None, :], weight, jnp.float32(0))
        fade = jnp.exp(peak - new_peak)
        mass = mass * fade + weight.sum(axis=1)
        if hasattr(at, "v_scale"):
            weight = weight * plt.load(at.v_scale.at[pool_row], mask=inside, other=0.0)[None, :]
        v = self._load(
            kv_row + jnp.int32(static.value_row), self.lane, at.out.shape[3], inside, jnp.int32(static.value_lane)
        )
        return new_peak, mass, acc * fade[:, None] + _dot(weight.astype(static.compute), v.astype(static.compute))

    def store(self, peak: Array, mass: Array, acc: Array) -> None:
        """Write the item's result; its log-sum-exp alone where no slot is visible."""
        at, real = self.at, self.real
        held = mass > 0
        lse = jnp.where(held, peak + jnp.log(jnp.where(held, mass, jnp.float32(1))), jnp.float32(NEG))
        plt.store(at.lse.at[self.row, self.item, self.member], lse, mask=real)

        @pl.when(self.high > self.low)
        def _store() -> None:
            out = acc / jnp.where(held, mass, jnp.float32(1))[:, None]
            mask = real[:, None] & (self.lane < at.out.shape[3])[None, :]
            plt.store(at.out.at[self.row, self.item, *_grid(self.member, self.lane)], out, mask=mask)

    def _load(self, rows: Array, lane: Array, dim: int, inside: Array, first_lane: Array | int = 0) -> Array:
        """Read ``dim`` channels of these rows of the pool; zeros at slots that are not ``inside``."""
        kv = self.at.kv
        mask = inside[:, None] & (lane < dim)[None, :]
        return plt.load(kv.at[*_grid(rows, lane + first_lane)], mask=mask, other=np.zeros((), kv.dtype)[()])

    def _scores(self, raw: Array, scale: float, slot: Array, distance: Array | None) -> Array:
        """Scaled and capped scores, with the biases of positions and of the first slot's mass."""
        s = capped(raw * jnp.float32(scale), self.static.soft_cap)
        if self.slopes is not None and distance is not None:
            s = s + self.slopes[:, None] * distance.astype(jnp.float32)[None, :]
        if self.mass_bias is not None:
            s = s + jnp.where(self.first_slot + slot == 0, self.mass_bias, jnp.float32(0))[None, :]
        return s

    def _store_logits(self, logits: Array, pool_row: Array, inside: Array) -> None:
        """Write the scores by page."""
        page_size = self.static.page_size
        page, within = pool_row // jnp.int32(page_size), pool_row & jnp.int32(page_size - 1)
        index = tuple(jnp.broadcast_to(x, logits.shape) for x in (page[None], self.member[:, None], within[None]))
        plt.store(self.at.logits.at[*index], logits, mask=self.real[:, None] & inside[None, :])


def _grid(rows: Array, columns: Array) -> tuple[Array, Array]:
    """Row and column indices broadcast to a matrix."""
    shape = (rows.shape[0], columns.shape[0])
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)


def _dot(a: Array, b: Array) -> Array:
    """Product with float32 sums; float32 operands are not rounded to TF32."""
    return plt.dot(a, b, allow_tf32=False).astype(jnp.float32)
