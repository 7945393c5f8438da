"""Which of the page layouts of ``pallas_kernels.pages`` a cache is made in: a static choice, by platform.

CPUs read keys by columns, 32 slots a page: a decode step's products then run along contiguous memory (measured on 2
cores, SmolLM2, batch 8, context 4,096: 66 ms a step against 103 ms for rows of keys), and a page of keys stays in the
L1 cache while the G query heads of a group visit it (32 slots a page: 61 GB/s of keys; 64: 48; 128: 40; 1,024: 24).
Accelerators read a head's pages, keys then values, in one copy each.
"""

from __future__ import annotations

import dataclasses

from jax.typing import DTypeLike

from kvjax.checks import whole_number
from kvjax.errors import UsageError, quoted
from pallas_kernels import dispatch
from pallas_kernels.pages import Columns, Lanes, Pages, Stacked

KINDS = ("columns", "stacked", "lanes")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How pages lie in memory; hashable and static.

    Attributes:
      kind: "columns", "stacked" or "lanes"; see ``pallas_kernels/pages.py``.
      page_size: slots a page.
      lanes: of "stacked", the numbers a row is padded to; of "lanes", those that it has at least; 0 for none.
    """

    kind: str = "columns"
    page_size: int = 32
    lanes: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"layout is {quoted(self.kind)}; give one of {', '.join(KINDS)}.")
        whole_number("page_size", self.page_size, 1)
        whole_number("lanes", self.lanes, 0)

    def zeros(self, batch: int, pages: int, head_dim: int, dtype: DTypeLike, key_dim: int | None = None) -> Pages:
        """Pages in which nothing was written; never uninitialised memory, because 0 x NaN would leak through a mask.

        ``key_dim`` is given where keys have fewer channels than values: see :meth:`with_key_channels`.
        """
        if self.kind == "columns":
            return Columns.zeros(batch, pages, self.page_size, head_dim, dtype, key_dim)
        if self.kind == "lanes":
            return Lanes.zeros(batch, pages, self.page_size, head_dim, dtype, key_dim, self.lanes)
        return Stacked.zeros(batch, pages, self.page_size, head_dim, dtype, max(head_dim, self.lanes))

    def with_key_channels(self, key_dim: int, head_dim: int) -> Layout:
        """The layout in the place of this one of keys that have fewer channels than values.

        Rows of keys and of values cannot be stacked, so they lie side by side. Pages of 128 slots are a TPU's, and its
        kernel reads whole registers of 128 lanes: there fewer channels save bytes only where they save a register.
        """
        if self.kind == "columns":
            return self
        width = key_dim + head_dim
        return Layout("lanes", self.page_size, width + -width % 128 if self.page_size % 128 == 0 else 0)


COLUMNS = Layout()


def layout_of(pages: Pages) -> Layout:
    """The layout of existing pages."""
    if isinstance(pages, Columns):
        return Layout("columns", pages.shape[2])
    if isinstance(pages, Lanes):
        width = pages.kv.shape[3]
        return Layout("lanes", pages.shape[2], width if width > pages.key_dim + pages.shape[3] else 0)
    lanes = pages.kv.shape[4]
    return Layout("stacked", pages.shape[2], lanes if lanes > pages.head_dim else 0)


def platform_layout(head_dim: int) -> Layout:
    """The layout that the platform compiled for reads fastest; every layout works everywhere."""
    return layout_on(dispatch.platform(), head_dim)


def layout_on(platform: str, head_dim: int) -> Layout:
    """The layout that this platform ("cpu", "gpu", "tpu") reads fastest."""
    if platform == "tpu":
        # Numbers a slot (scales, positions, scores) are read in whole rows of 128 lanes.
        if head_dim == 64:
            return Layout("lanes", 128)
        fill = -head_dim % 128
        return Layout("stacked", 128, head_dim + fill if fill else 0)
    if platform == "gpu":
        return Layout("stacked", 64)
    return COLUMNS
