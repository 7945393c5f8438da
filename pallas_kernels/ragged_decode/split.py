"""Division of ragged heads into items of equal size, one GPU thread block each.

Items follow from the heads' runs of pages alone, so they are a constant of the program: a thread block whose slots are
not filled yet exits at once. A list of only the live items (``worklist.py``, for TPUs, whose few cores go through it
one by one) would launch as many blocks, since shapes are static, after half a dozen small XLA kernels to make it.

Where runs differ from row to row, the items of each row are such a list, of as many as any runs of the row's pages
need. Its last may be of no head: they begin past the last head's slots, so that they exit at once too.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu import chip
from pallas_kernels.ragged_decode.decode_problem import Decoded, Problem
from pallas_kernels.ragged_decode.worklist import most_items
from pallas_kernels.softmax import NEG


@dataclasses.dataclass(frozen=True)
class Split:
    """Items of the batch rows. Built by :meth:`of`.

    Attributes:
      rows: slots of one item; the last of a head may be cut short by its run.
      table: int32 [3, I], the same for all rows, or [B, 3, I] where runs are by row: each item's head, first page in
        the row's pool, first slot in its head.
      count: [H] or [B, H] items of each head; head h owns items ``begin[h] : begin[h] + count[h]``.
      most: most items of a head; static.
    """

    rows: int
    table: np.ndarray | Int[Array, "B 3 I"]
    count: np.ndarray | Int[Array, "B H"]
    most: int

    @classmethod
    def of(cls, p: Problem, pages: int) -> Self:
        """Items of at most this many pages."""
        page_size = p.pages.shape[2]
        most = -(-max(p.runs) // pages)
        if p.by_row:
            count, table = _by_row(p, pages)
            return cls(pages * page_size, table, count, most)
        runs = np.asarray(p.runs)
        count = -(-runs // pages)
        head = np.repeat(np.arange(len(runs)), count)
        nth = np.arange(len(head)) - np.repeat(np.cumsum(count) - count, count)
        table = np.stack([head, p.first_page[head] + nth * pages, nth * pages * page_size])
        return cls(pages * page_size, table.astype(np.int32), count, most)

    @property
    def items(self) -> int:
        """I, items of a row of the batch."""
        return self.table.shape[-1]

    @property
    def begin(self) -> np.ndarray | Int[Array, "B H"]:
        """First item of each head."""
        return _before(self.count)


def _by_row(p: Problem, pages: int) -> tuple[Int[Array, "B H"], Int[Array, "B 3 I"]]:
    """Count and table of :class:`Split`, in XLA."""
    total, page_size = p.pages.shape[1:3]
    start, rows = jnp.asarray(p.first_page), jnp.int32(pages * page_size)
    count = jnp.maximum((p.length.astype(jnp.int32) + rows - 1) // rows, 1)
    begin = jnp.asarray(_before(count))
    item = jnp.arange(most_items(p.runs, 1, pages, total), dtype=jnp.int32)
    head = jnp.sum(item[:, None] >= begin[:, None, 1:], axis=2, dtype=jnp.int32)

    def of_head(x: Int[Array, "B H"]) -> Int[Array, "B I"]:
        return jnp.take_along_axis(x, head, axis=1, mode="promise_in_bounds")

    nth = item - of_head(begin)
    table = jnp.stack([head, of_head(start) + nth * jnp.int32(pages), nth * jnp.int32(pages * page_size)], axis=1)
    return count, table


def _before(count: np.ndarray | Int[Array, "*B H"]) -> np.ndarray | Int[Array, "*B H"]:
    """Sum of the counts before each."""
    if isinstance(count, np.ndarray):
        return np.cumsum(count) - count
    # As a masked sum, which is part of the kernel that reads it; a cumulative sum is a kernel of its own.
    heads = np.arange(count.shape[1])
    earlier = heads < heads[:, None]
    return jnp.sum(jnp.where(earlier, count[:, None, :], jnp.int32(0)), axis=2, dtype=jnp.int32)


def at_item(table: Any, row: Any, item: Any) -> tuple[Any, Any, Any]:
    """Head, first page and first slot of an item of a row, in a kernel."""
    where = (row,) if len(table.shape) == 3 else ()
    return tuple(table[(*where, field, item)] for field in range(3))


def visible(length: Any, first_slot: Any, rows: int, window: int | None) -> tuple[Any, Any]:
    """First and end of an item's visible slots, in a kernel; ``window`` is over slots."""
    zero, end = jnp.int32(0), jnp.int32(rows)
    high = jnp.clip(length - first_slot, zero, end)
    return zero if window is None else jnp.clip(length - jnp.int32(window) - first_slot, zero, end), high


def pages_per_item(p: Problem) -> int:
    """Pages of an item such that every multiprocessor gets about four items: enough for balance, few enough to merge.

    Between 128 slots, below which starting an item costs more than reading it, and 1,024. Both limits grow with more
    than 4 queries per head: the items' results are ``2 * group / slots`` of the bytes of 16-bit rows.
    """
    batch, total, page_size, _ = p.pages.shape
    queries = max(p.q.shape[2], 4)
    slots_per_item = max(batch * total * page_size // (4 * chip.target().processors), 1)
    slots = min(max(pl.next_power_of_2(slots_per_item), 32 * queries), 256 * queries)
    return max(slots // page_size, 1)


def queries(p: Problem, dtype: jnp.dtype) -> Float[Array, "B H G K"]:
    """Queries times the scales of the keys' channels, in this dtype."""
    q = p.q if p.k_scale is None else p.q.astype(jnp.float32) * p.k_scale[:, :, None]
    return q.astype(dtype)


def masked_logits(p: Problem, logits: Float[Array, "B P G R"]) -> Float[Array, "B P G R"]:
    """Set masked slots of a kernel's scores by page to ``NEG``; kernels do not write pages without visible slots."""
    return jnp.where(p.visible()[:, :, None], logits, jnp.float32(NEG))


def cost(p: Problem) -> pl.CostEstimate:
    """Cost estimate for full runs: an upper bound, since lengths are data."""
    batch, total, page_size, dim = p.pages.shape
    slots, group = batch * total * page_size, p.q.shape[2]
    return pl.CostEstimate(
        flops=2 * slots * group * (p.pages.key_dim + dim),
        bytes_accessed=slots * p.pages.slot_nbytes + 2 * p.q.size * p.q.dtype.itemsize,
        transcendentals=slots * group,
    )


def merged(
    p: Problem, split: Split, out: Float[Array, "B I G D"], lse: Float[Array, "B I G"], logits: Array | None
) -> Decoded:
    """Merge the items' results to the heads', by :mod:`~pallas_kernels.ragged_decode.merge`."""
    from pallas_kernels.ragged_decode.merge import merge

    whole, mass = merge(out, lse, split.begin, split.count, split.most)
    return Decoded(whole.astype(p.q.dtype), mass, None if logits is None else masked_logits(p, logits))
