"""Ragged heads cut into equal pieces of work, in XLA, once a step.

An *item* is a block of consecutive pages, of which rows ``low <= r < high`` belong to one segment (one head of one row
of the batch). Long heads make many items and short ones few, so that cores and streaming multiprocessors share the
rows evenly and nothing is padded to the longest head. Blocks are read whole: the last of a segment reaches into its
neighbour's pages, and the one that would reach past the pool begins earlier instead; ``low`` and ``high`` say which
rows count.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

#: Bits of ``WorkList.flags``: the segment's first item, its last, and one that holds the segment's slot 0 (at ``low``).
FIRST, LAST, ZERO = 1, 2, 4


class WorkList(NamedTuple):
    """Items in the order of segments, all int32 [W]; those at ``count`` ([1]) and beyond are not to be run.

    Attributes:
      segment: which (row, head).
      page: the block's first page in the pool of all rows.
      low: first of the block's rows that counts. high: one past the last.
      flags: ``FIRST``, ``LAST``, ``ZERO``.
      count: items.
    """

    segment: Int[Array, " W"]
    page: Int[Array, " W"]
    low: Int[Array, " W"]
    high: Int[Array, " W"]
    flags: Int[Array, " W"]
    count: Int[Array, " 1"]


def most_items(runs: tuple[int, ...], batch: int, pages_per_item: int) -> int:
    """Items there are when every run is full; static."""
    return batch * sum(-(-run // pages_per_item) for run in runs)


def work_list(
    start: Int[Array, " S"],
    length: Int[Array, " S"],
    *,
    page_size: int,
    pages_per_item: int,
    max_items: int,
    total_pages: int,
    first: Int[Array, " S"] | None = None,
    row_pages: int | None = None,
) -> WorkList:
    """Cut segments into items.

    Args:
      start: first page of each segment. length: its valid slots; a segment that holds none gets no item.
      pages_per_item: at most ``total_pages``, the pages of the pool of all rows.
      total_pages: one that is larger by ``pages_per_item`` lets blocks begin where they would, for implementations
        that copy no further than ``high``.
      first: first slot that is visible, 0 by default; blocks before it are left out.
      row_pages: pages of a row of the batch, at least ``pages_per_item``: no block reaches into the next row.
    """
    block = page_size * pages_per_item
    first = jnp.zeros_like(length) if first is None else jnp.minimum(first, length)
    ends = jnp.cumsum(jnp.where(length > first, -(-length // block) - first // block, 0), dtype=jnp.int32)
    w = jnp.arange(max_items, dtype=jnp.int32)
    # Compared with every segment, side by side: a binary search would be a loop.
    segment = jnp.minimum(jnp.sum(w[:, None] >= ends, axis=1, dtype=jnp.int32), length.shape[0] - 1)
    mine = segment[:, None] == jnp.arange(length.shape[0], dtype=jnp.int32)

    def of_segment(x: Array) -> Array:
        """x[segment] as a sum: of more than 256 numbers a TPU's gather takes megabytes and a loop of its own."""
        return jnp.sum(jnp.where(mine, x, 0), axis=1, dtype=jnp.int32)

    start, length, first = of_segment(start), of_segment(length), of_segment(first)
    end = of_segment(ends)
    count = jnp.where(length > first, -(-length // block) - first // block, 0)
    nth = jnp.where(w < ends[-1], w - (end - count), 0)
    slot = (first // block + nth) * block
    wanted = start + slot // page_size
    limit = total_pages if row_pages is None else (start // row_pages + 1) * row_pages
    page = jnp.minimum(wanted, limit - pages_per_item)
    shift = (wanted - page) * page_size
    low = jnp.maximum(first - slot, 0) + shift
    high = jnp.clip(length - slot, 0, block - shift) + shift
    flags = jnp.where(nth == 0, FIRST, 0) | jnp.where(nth == count - 1, LAST, 0)
    flags |= jnp.where((slot == 0) & (first == 0), ZERO, 0)
    fields = (segment, page, low, high, flags, ends[-1:])
    return WorkList(*(x.astype(jnp.int32) for x in fields))
