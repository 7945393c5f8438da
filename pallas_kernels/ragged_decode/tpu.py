"""Pallas TPU kernel: one program per core walks the work list and copies blocks of pages through a ring of buffers.

- One program with its own ring costs 60 cycles per block beside the arithmetic; a grid with block specs took 300
  instructions (v5e, v6e, tpu7x; libtpu 0.0.42).
- Only pages that hold slots of the segment are copied; the rest of a buffer keeps an earlier block's rows. They are
  finite, so values need no mask: their weights are 0. Keys past the length may have any value, NaN included.
- The page size, from 16 slots to 128, does not change the schedule: a block is one copy.
- Streams of one number per slot (value scales, positions, scores) need pages of 128 slots: smaller rows would be padded
  to 128 lanes in memory, and moved between lanes for use. They are read in place where the pages of a row are a
  multiple of 8; else XLA may give [B, P, R] another layout, and copies it (4 bytes per slot).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels import argument_checks, dispatch, tuned
from pallas_kernels.pages import Columns, Lanes, Stacked
from pallas_kernels.ragged_decode.decode_problem import Decoded, Problem
from pallas_kernels.ragged_decode.tpu_call import call
from pallas_kernels.ragged_decode.tpu_refs import LANES, Static
from pallas_kernels.ragged_decode.tpu_sizes import (
    TpuConfig,
    block_lanes,
    blocks_together,
    chip_of,
    fit,
    in_memory,
    row_lanes,
    streams_of,
)
from pallas_kernels.ragged_decode.worklist import WorkList, most_items, work_list
from pallas_kernels.softmax import NEG


def decode(problem: Problem, *, config: TpuConfig | None = None, interpret: Any = False) -> Decoded:
    """See :func:`pallas_kernels.ragged_decode.ragged_decode`.

    Args:
      interpret: True, or ``pltpu.InterpretParams``, to run anywhere.

    Raises:
      NotImplementedError: this kernel cannot do it; the message says why.
    """
    p = problem
    _, total, page_size, _ = p.pages.shape
    _check(p)
    kind = dispatch.device_kind()
    if config is None:
        rule = TpuConfig.default(kind, page_size, row_lanes(p) // 2, p.pages.dtype)
        config = tuned.config("ragged_decode.tpu", p, TpuConfig) or rule
    chip = chip_of(kind)
    if "float8" in p.pages.dtype.name and not (chip.float8 or interpret):
        raise NotImplementedError(f"float8 pages are converted number by number on {kind}; store int8.")
    p = _two_queries(p)
    pages, buffers, strips = fit(config, p, kind)
    by_slot = p.window is not None and p.position is None
    streams = streams_of(p)
    items = _items(p, pages, by_slot, clamp=bool(streams))
    float32 = p.pages.dtype == jnp.float32
    queries, held = p.q.shape[2], in_memory(p)
    if held:
        queries = -(-queries // (8 * strips)) * 8
    static = Static(
        page_size=page_size,
        pages=pages,
        row_pages=total,
        heads=p.q.shape[1],
        buffers=buffers,
        cores=config.cores or chip.cores,
        stacked=isinstance(p.pages, Stacked),
        tile=chip.tile(block_lanes(p)) if float32 else None,
        queries=queries,
        strips=strips,
        in_memory=held,
        together=blocks_together(config, p),
        scale=p.scale,
        soft_cap=p.soft_cap,
        window=None if by_slot else p.window,
        logits_scale=p.logits_scale,
        by_page=interpret is True,
    )
    out, lse, logits = call(p, static, items, streams, interpret)
    decoded = _decoded(p, out, lse, logits)
    if p is problem:
        return decoded
    logits = None if decoded.logits is None else decoded.logits[:, :, :1]
    return Decoded(decoded.out[:, :, :1], decoded.lse[:, :, :1], logits)


def _two_queries(p: Problem) -> Problem:
    """Add a second query of zeros where heads have only one: JAX 0.12's Mosaic cannot broadcast one row to sublanes.

    A register has 8 rows anyway, so this costs only the extra row of scores, where these are returned.
    """
    if p.q.shape[2] != 1:
        return p
    slopes = None if p.slopes is None else np.pad(p.slopes, ((0, 0), (0, 1)))
    return dataclasses.replace(p, q=jnp.pad(p.q, ((0, 0), (0, 0), (0, 1), (0, 0))), slopes=slopes)


def _check(p: Problem) -> None:
    argument_checks.compiled_in(p.scale, p.logits_scale, p.soft_cap)
    if isinstance(p.pages, Columns):
        raise NotImplementedError("The TPU kernel reads stacked pages or lanes, not columns.")
    page_size, dtype = p.pages.shape[2], jnp.dtype(p.pages.dtype)
    lanes = p.pages.kv.shape[-1]
    if lanes % LANES:
        raise NotImplementedError(f"Rows of {lanes} lanes are not whole registers; pad heads to 128, or use lanes.")
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.int8) and "float8" not in dtype.name:
        raise NotImplementedError(f"The TPU kernel reads float32, bfloat16, int8 or float8 pages, not {dtype.name}.")
    if page_size & (page_size - 1) or page_size * dtype.itemsize < 32:
        raise NotImplementedError(f"Pages of {page_size} {dtype.name} slots are not whole tiles of a power of two.")
    if (streams_of(p) or p.with_logits) and page_size % LANES:
        raise NotImplementedError(f"Numbers beside every slot need pages of {LANES} slots, not {page_size}.")


def _items(p: Problem, pages: int, by_slot: bool, clamp: bool) -> WorkList:
    batch, (rows, total, page_size, _) = p.q.shape[0], p.pages.shape
    row = jnp.arange(batch, dtype=jnp.int32)
    row = row if p.first_row is None else row + p.first_row
    start = row[:, None] * jnp.int32(total) + jnp.asarray(p.first_page)
    length = p.length.reshape(-1).astype(jnp.int32)
    return work_list(
        start.reshape(-1),
        length,
        page_size=page_size,
        pages_per_item=pages,
        max_items=most_items(p.runs, batch, pages, total if p.by_row else None),
        # Pages are copied only up to the last valid one, so blocks may extend past the pool; streams are copied whole.
        total_pages=rows * total + pages,
        row_pages=total if clamp else None,
        first=jnp.maximum(length - jnp.int32(p.window), 0) if by_slot and p.window is not None else None,
    )


def _decoded(p: Problem, out: Array, lse: Array, logits: Array | None) -> Decoded:
    """Merge the cores' results by log-sum-exp: a head may be split between two."""
    batch, heads, group, key_dim = p.q.shape
    dim = p.pages.shape[3]
    out = out[..., key_dim : key_dim + dim] if isinstance(p.pages, Lanes) else out[..., :dim]
    lse = lse[..., : out.shape[2]]
    if out.shape[1] != batch * heads:  # Strips of a head's queries; the last may be padded.
        out = out.reshape(out.shape[0], batch * heads, -1, dim)[:, :, :group]
        lse = lse.reshape(out.shape[0], batch * heads, -1)[..., :group]
    if out.shape[0] > 1:
        peak = lse.max(axis=0)
        weight = jnp.exp(lse - peak)
        mass = weight.sum(axis=0)
        out = jnp.sum(weight[..., None] * out.astype(jnp.float32), axis=0) / mass[..., None]
        lse = jnp.where(peak > NEG, peak + jnp.log(mass), NEG)
    out = out.reshape(batch, heads, group, dim).astype(p.q.dtype)
    if logits is not None:
        logits = logits.reshape(batch, -1, group, logits.shape[-1])
    return Decoded(out, lse.reshape(batch, heads, group), logits)
