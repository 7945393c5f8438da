"""Work list of a decode step: ragged heads divided into items of equal size, in XLA, once per step.

An *item* is a block of consecutive pages, of which slots ``low <= r < high`` belong to one segment (one head of one
batch row). Long heads get many items and short ones few, so that cores get equal work and nothing is padded to the
longest head. Blocks have a fixed size: the last of a segment extends into its neighbour's pages, and one that would
extend past the pool starts earlier instead; ``low`` and ``high`` mark the slots that count.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

#: Bits of ``WorkList.flags``: the segment's first item, its last, and one that holds the segment's slot 0 (at ``low``).
FIRST, LAST, ZERO = 1, 2, 4


class WorkList(NamedTuple):
    """Items in the order of segments, all int32 [W]; those from ``count`` ([1]) on are padding.

    Attributes:
      segment: index of (batch row, head).
      page: the block's first page in the pool of all rows.
      low: first slot of the block that counts. high: one past the last.
      flags: ``FIRST``, ``LAST``, ``ZERO``.
      count: items.
    """

    segment: Int[Array, " W"]
    page: Int[Array, " W"]
    low: Int[Array, " W"]
    high: Int[Array, " W"]
    flags: Int[Array, " W"]
    count: Int[Array, " 1"]


def most_items(runs: tuple[int, ...], batch: int, pages_per_item: int, row_pages: int | None = None) -> int:
    """Number of items when every run of pages is full; static.

    ``row_pages``: pages of a row, given where runs differ from row to row and ``runs`` are the most of each head.
    """
    items = sum(-(-run // pages_per_item) for run in runs)
    if row_pages is not None:
        # Each head begins an item, and each further item follows a whole one.
        items = min(items, len(runs) + (row_pages - len(runs)) // pages_per_item)
    return batch * items


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
    """Divide segments into items.

    Args:
      start: first page of each segment. length: its valid slots; a segment that holds none gets no item.
      pages_per_item: at most ``total_pages``, the pages of the pool of all rows.
      total_pages: larger by ``pages_per_item`` than the pool for implementations that copy no further than ``high``:
        their blocks never have to start earlier.
      first: first visible slot, 0 by default; blocks before it get no item.
      row_pages: pages of a batch row, at least ``pages_per_item``; if given, no block extends into the next row.
    """
    block = page_size * pages_per_item
    first = jnp.zeros_like(length) if first is None else jnp.minimum(first, length)
    ends = jnp.cumsum(jnp.where(length > first, -(-length // block) - first // block, 0), dtype=jnp.int32)
    w = jnp.arange(max_items, dtype=jnp.int32)
    # Compared with every segment at once: a binary search would be a loop.
    segment = jnp.minimum(jnp.sum(w[:, None] >= ends, axis=1, dtype=jnp.int32), length.shape[0] - 1)
    one_hot = segment[:, None] == jnp.arange(length.shape[0], dtype=jnp.int32)

    def of_segment(x: Array) -> Array:
        """``x[segment]`` as a masked sum: a TPU's gather from over 256 numbers takes megabytes and its own loop."""
        return jnp.sum(jnp.where(one_hot, x, 0), axis=1, dtype=jnp.int32)

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
