"""Ragged heads cut into equal items, one thread block each, for GPUs.

Where items begin follows from the heads' runs alone, so it is a constant of the program: a block whose rows are not
filled yet leaves at once. A list of only the live items (``worklist.py``, for TPUs, whose few cores go through it one
by one) would launch as many blocks, since shapes are static, after half a dozen small XLA kernels to make it.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.gpu import chip
from pallas_kernels.ragged_decode.decode_problem import Decoded, Problem
from pallas_kernels.softmax import NEG


@dataclasses.dataclass(frozen=True)
class Split:
    """Items of one row of the batch; all rows have the same. Built by :meth:`of`.

    Attributes:
      rows: slots of one item; the last of a head may be cut short by its run.
      table: int32 [3, I]: each item's head, first page in the row's pool, first slot in its head.
      count: [H] items of each head; head h owns items ``begin[h] : begin[h] + count[h]``.
    """

    rows: int
    table: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, p: Problem, pages: int) -> Self:
        """Items of at most this many pages."""
        page_size = p.pages.shape[2]
        runs = np.asarray(p.runs)
        count = -(-runs // pages)
        head = np.repeat(np.arange(len(runs)), count)
        nth = np.arange(len(head)) - np.repeat(np.cumsum(count) - count, count)
        table = np.stack([head, p.starts[head] + nth * pages, nth * pages * page_size])
        return cls(pages * page_size, table.astype(np.int32), count)

    @property
    def items(self) -> int:
        """I, items of a row of the batch."""
        return self.table.shape[1]

    @property
    def begin(self) -> np.ndarray:
        """[H] first item of each head."""
        return np.cumsum(self.count) - self.count


def pages_per_item(p: Problem) -> int:
    """Pages of an item such that every multiprocessor gets about four: enough to even out, few enough to merge.

    Between 128 slots, below which an item's start costs more than its rows, and 1,024. For more than 4 queries a head
    both grow with them: the results of items are ``2 * group / slots`` of the bytes of 16-bit rows.
    """
    batch, total, page_size, _ = p.pages.shape
    queries = max(p.q.shape[2], 4)
    share = max(batch * total * page_size // (4 * chip.target().processors), 1)
    slots = min(max(pl.next_power_of_2(share), 32 * queries), 256 * queries)
    return max(slots // page_size, 1)


def queries(p: Problem, dtype: jnp.dtype) -> Float[Array, "B H G D"]:
    """Queries as a kernel multiplies them: with the scales of the keys' channels, in this dtype."""
    q = p.q if p.k_scale is None else p.q.astype(jnp.float32) * p.k_scale[:, :, None]
    return q.astype(dtype)


def shown(p: Problem, logits: Float[Array, "B P G R"]) -> Float[Array, "B P G R"]:
    """Scores by page as kernels leave them, pages without a visible slot unwritten; ``NEG`` in slots not visible."""
    return jnp.where(_visible(p)[:, :, None], logits, jnp.float32(NEG))


def _visible(p: Problem) -> Bool[Array, "B P R"]:
    page_size = p.pages.shape[2]
    slot: Int[Array, "P R"] = jnp.asarray(p.first_slot[:, None] + np.arange(page_size, dtype=np.int32))
    length = p.length[:, p.owner][:, :, None]
    visible = slot < length
    if p.window is None:
        return visible
    if p.position is not None and p.query_position is not None:
        return visible & (p.position > p.query_position[:, None, None] - p.window)
    return visible & (slot >= length - p.window)


def cost(p: Problem) -> pl.CostEstimate:
    """Of a step over full runs: an upper bound, since lengths are not known to the compiler."""
    batch, total, page_size, dim = p.pages.shape
    slots, group = batch * total * page_size, p.q.shape[2]
    return pl.CostEstimate(
        flops=4 * slots * group * dim,
        bytes_accessed=slots * p.pages.row_nbytes + 2 * p.q.size * p.q.dtype.itemsize,
        transcendentals=slots * group,
    )


def merged(
    p: Problem, split: Split, out: Float[Array, "B I G D"], lse: Float[Array, "B I G"], logits: Array | None
) -> Decoded:
    """Items' results to heads', by :mod:`~pallas_kernels.ragged_decode.merge`."""
    from pallas_kernels.ragged_decode.merge import merge

    whole, mass = merge(out, lse, split.begin, split.count)
    return Decoded(whole.astype(p.q.dtype), mass, None if logits is None else shown(p, logits))
