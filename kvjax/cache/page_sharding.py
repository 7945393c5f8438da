"""How the pages of a layer's pool are divided among the devices of a mesh.

KV heads are sharded over devices in equal blocks. Where their number does not divide by the devices (3 heads on 2, a
single one, the few that RazorAttention protects), the devices that remain shard each head's pages: page p of a head is
on device ``p mod n`` of the n that hold it. So every device holds equally many bytes whatever the heads are, appending
fills the devices in turn, a longer run leaves every page where it is, and a device's valid slots are a prefix of its
own run, as kernels want it. Attention over one device's pages is merged with the others' by log-sum-exp.

Policies never know. They run on every device that holds pages of a head, on all of the head's KV vectors, and decide
alike; the numbers of slots (``LayerCache.marks``) are a few bytes and every device holds all of them. Only ``pool.py``
and ``attention.py`` tell a part of the pages from all of them.

Methods that use the device's index run inside ``jax.shard_map``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class PageSharding:
    """How a pool is divided; static.

    Attributes:
      head_axes: axes of the mesh over which its KV heads are sharded.
      page_axes: axes over which each head's pages are sharded.
      head_parts, page_parts: devices along these axes.
      by_row: whether each row has its own runs of pages, which then take up to a page of every device more.
    """

    head_axes: tuple[str, ...] = ()
    page_axes: tuple[str, ...] = ()
    head_parts: int = 1
    page_parts: int = 1
    by_row: bool = False

    def rounded(self, pages: tuple[int, ...]) -> tuple[int, ...]:
        """The pages of each head rounded up to a multiple of the devices that shard them."""
        more = self.page_parts - 1 if self.by_row else 0
        return tuple(-(-(count + more) // self.page_parts) * self.page_parts for count in pages)

    def local_counts(self, pages: tuple[int, ...]) -> tuple[int, ...]:
        """Pages of each head that one device holds."""
        return tuple(count // self.page_parts for count in pages)

    def local_starts(self, starts: Int[Array, "B H"] | None) -> Int[Array, "B H"] | None:
        """The first pages of runs of :meth:`rounded` sizes, as one device counts its own pages."""
        return starts if starts is None else starts // self.page_parts

    # --- on one device ----------------------------------------------------------------------------------------

    def index(self) -> Any:
        """The index of this device among those that shard pages."""
        return jax.lax.axis_index(self.page_axes) if self.page_axes else jnp.int32(0)

    def first_head(self, heads: int) -> Any:
        """The number of the first of this device's ``heads`` heads among all heads of the pool."""
        return jax.lax.axis_index(self.head_axes) * heads if self.head_axes else jnp.int32(0)

    def mean_over_heads(self, x: Array) -> Array:
        """The mean over all heads, given the mean over this device's heads."""
        return jax.lax.pmean(x, self.head_axes) if self.head_axes else x

    def sum_over_pages(self, x: Array) -> Array:
        """The sum over the devices that shard pages: of numbers that one of them holds and the others have as zeros."""
        return jax.lax.psum(x, self.page_axes) if self.page_axes else x

    def gather(self, pages: Array) -> Array:
        """[B, P / n, ...] of every device as [B, P, ...] in the order of the heads' pages."""
        if not self.page_axes:
            return pages
        every = jax.lax.all_gather(pages, self.page_axes, axis=2)
        return every.reshape(every.shape[0], -1, *every.shape[3:])

    def local_pages(self, pages: Array) -> Array:
        """The pages [B, P / n, ...] that this device holds of all pages [B, P, ...]."""
        if not self.page_axes:
            return pages
        split = pages.reshape(pages.shape[0], -1, self.page_parts, *pages.shape[2:])
        return jax.lax.dynamic_index_in_dim(split, self.index(), axis=2, keepdims=False)

    def local_slots(self, x: Array, page_size: int) -> Array:
        """The slots in this device's pages, out of the slots [B, H, N, ...] of whole heads; in order."""
        if not self.page_axes:
            return x
        stride = page_size * self.page_parts
        fill = ((0, 0), (0, 0), (0, -x.shape[2] % stride)) + ((0, 0),) * (x.ndim - 3)
        x = jnp.pad(x, fill)
        split = x.reshape(*x.shape[:2], -1, self.page_parts, page_size, *x.shape[3:])
        own = jax.lax.dynamic_index_in_dim(split, self.index(), axis=3, keepdims=False)
        return own.reshape(*own.shape[:2], -1, *own.shape[4:])

    def shard_axis(self, x: Array, axis: int) -> Array:
        """This device's block of an axis that is divided among the devices that shard pages."""
        if not self.page_axes:
            return x
        size = x.shape[axis] // self.page_parts
        return jax.lax.dynamic_slice_in_dim(x, self.index() * size, size, axis)

    def gather_axis(self, x: Array, axis: int) -> Array:
        """Undo :meth:`shard_axis`: the blocks of all devices, in order."""
        return jax.lax.all_gather(x, self.page_axes, axis=axis, tiled=True) if self.page_axes else x

    def local_length(self, length: Int[Array, "B H"], page_size: int) -> Int[Array, "B H"]:
        """The valid slots of each head in this device's pages; ``length`` counts all devices'."""
        if not self.page_axes:
            return length
        stride = page_size * self.page_parts
        return length // stride * page_size + jnp.clip(length % stride - self.index() * page_size, 0, page_size)

    def locate(self, page: Array, total: int) -> tuple[Array, Array]:
        """Each page's index on this device (out of range, ``total / n``, if it is not here), and whether it is here."""
        if not self.page_axes:
            return page, jnp.ones(page.shape, bool)
        own = (page % self.page_parts == self.index()) & (page < total)
        return jnp.where(own, page // self.page_parts, total // self.page_parts), own


#: A pool that is on one device.
UNSHARDED = PageSharding()
