"""What one device of a mesh holds of a layer's pool: some of the KV heads, and of each head some of its pages.

Heads are dealt to devices in equal blocks. Where their number does not divide by the devices (3 heads on 2, a single
one, the few that RazorAttention protects), the devices that remain share each head's pages: page p of a head is on
device ``p mod n`` of the n that share it. So every device holds equally many bytes whatever the heads are, appending
fills the devices in turn, a longer run leaves every page where it is, and a device's valid slots are a prefix of its
own run, as kernels want it. Attention over a share is merged with the others' by log-sum-exp.

Policies never know. They run on every device that shares a head, on whole rows, and decide alike; numbers a slot
(marks) are a few bytes and are kept whole. Only ``pool.py`` and ``attention.py`` tell a share from a whole.

These functions run inside ``jax.shard_map``, except :func:`unshard` and :func:`shard`, which take and return the arrays
of all devices.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

if TYPE_CHECKING:
    from kvjax.cache.pool import LayerCache


@dataclasses.dataclass(frozen=True)
class PageSharding:
    """How a pool is divided; static.

    Attributes:
      head_axes: axes of the mesh that its heads are dealt over; page_axes: that each head's pages are dealt over.
      head_parts, page_parts: devices along them.
    """

    head_axes: tuple[str, ...] = ()
    page_axes: tuple[str, ...] = ()
    head_parts: int = 1
    page_parts: int = 1

    def rounded(self, pages: tuple[int, ...]) -> tuple[int, ...]:
        """Pages of heads, made to divide by the devices that share them."""
        return tuple(-(-count // self.page_parts) * self.page_parts for count in pages)

    def local_counts(self, pages: tuple[int, ...]) -> tuple[int, ...]:
        """Pages of each head that one device holds."""
        return tuple(count // self.page_parts for count in pages)

    # --- on one device ----------------------------------------------------------------------------------------

    def index(self) -> Any:
        """Which of the devices that share pages this one is."""
        return jax.lax.axis_index(self.page_axes) if self.page_axes else jnp.int32(0)

    def first_head(self, heads: int) -> Any:
        """The first of this device's ``heads`` among those that are dealt."""
        return jax.lax.axis_index(self.head_axes) * heads if self.head_axes else jnp.int32(0)

    def mean_over_heads(self, x: Array) -> Array:
        """The mean over all devices' heads of what is already a mean over this device's."""
        return jax.lax.pmean(x, self.head_axes) if self.head_axes else x

    def sum_over_pages(self, x: Array) -> Array:
        """What one of the devices holds and the others have zeros for."""
        return jax.lax.psum(x, self.page_axes) if self.page_axes else x

    def gather(self, pages: Array) -> Array:
        """[B, P / n, ...] of every device as [B, P, ...] in the order of the heads' pages."""
        if not self.page_axes:
            return pages
        every = jax.lax.all_gather(pages, self.page_axes, axis=2)
        return every.reshape(every.shape[0], -1, *every.shape[3:])

    def local_pages(self, pages: Array) -> Array:
        """This device's of [B, P, ...] pages."""
        if not self.page_axes:
            return pages
        split = pages.reshape(pages.shape[0], -1, self.page_parts, *pages.shape[2:])
        return jax.lax.dynamic_index_in_dim(split, self.index(), axis=2, keepdims=False)

    def local_slots(self, rows: Array, page_size: int) -> Array:
        """This device's slots of rows [B, H, N, ...], whole pages: what it holds of each head, in order."""
        if not self.page_axes:
            return rows
        stride = page_size * self.page_parts
        fill = ((0, 0), (0, 0), (0, -rows.shape[2] % stride)) + ((0, 0),) * (rows.ndim - 3)
        rows = jnp.pad(rows, fill)
        split = rows.reshape(*rows.shape[:2], -1, self.page_parts, page_size, *rows.shape[3:])
        own = jax.lax.dynamic_index_in_dim(split, self.index(), axis=3, keepdims=False)
        return own.reshape(*own.shape[:2], -1, *own.shape[4:])

    def shard_axis(self, x: Array, axis: int) -> Array:
        """This device's block of an axis that the devices which share pages divide."""
        if not self.page_axes:
            return x
        size = x.shape[axis] // self.page_parts
        return jax.lax.dynamic_slice_in_dim(x, self.index() * size, size, axis)

    def gather_axis(self, x: Array, axis: int) -> Array:
        """Undo :meth:`shard_axis`: the blocks of all of them."""
        return jax.lax.all_gather(x, self.page_axes, axis=axis, tiled=True) if self.page_axes else x

    def local_length(self, length: Int[Array, "B H"], page_size: int) -> Int[Array, "B H"]:
        """Valid slots of this device's run, of heads that hold ``length`` in all."""
        if not self.page_axes:
            return length
        stride = page_size * self.page_parts
        return length // stride * page_size + jnp.clip(length % stride - self.index() * page_size, 0, page_size)

    def locate(self, page: Array, total: int) -> tuple[Array, Array]:
        """Where whole pages are on this device, out of range (``total / n``) for another's; and which are its own."""
        if not self.page_axes:
            return page, jnp.ones(page.shape, bool)
        own = (page % self.page_parts == self.index()) & (page < total)
        return jnp.where(own, page // self.page_parts, total // self.page_parts), own


#: A pool that is on one device.
UNSHARDED = PageSharding()


def local_shard(pool: LayerCache, sharding: PageSharding) -> LayerCache:
    """An empty pool as one device holds it; its pages must divide."""
    if sharding == UNSHARDED:
        return pool
    count = sum(sharding.local_counts(pool.pages))
    scales = pool.scales and dataclasses.replace(pool.scales, v=pool.scales.v[:, :count])
    return pool.replace(kv=jax.tree.map(lambda x: x[:, :count], pool.kv), scales=scales, sharding=sharding)


def gather_pages(pool: LayerCache) -> LayerCache:
    """The pool with all pages of this device's heads."""
    sharding = pool.sharding
    if not sharding.page_axes:
        return pool
    scales = pool.scales and dataclasses.replace(pool.scales, v=sharding.gather(pool.scales.v))
    return pool.replace(kv=jax.tree.map(sharding.gather, pool.kv), scales=scales, sharding=UNSHARDED)


def unshard(pool: LayerCache) -> LayerCache:
    """The arrays of all devices, in the order of an undivided pool's pages."""
    sharding = pool.sharding

    def ordered(x: Array) -> Array:
        parts = x.reshape(x.shape[0], sharding.head_parts, sharding.page_parts, -1, *x.shape[2:])
        return parts.swapaxes(2, 3).reshape(x.shape)

    return _reordered(pool, UNSHARDED, ordered)


def shard(pool: LayerCache, sharding: PageSharding) -> LayerCache:
    """Undo :func:`unshard`: an undivided pool, whose pages must divide, as the devices will hold it."""

    def ordered(x: Array) -> Array:
        parts = x.reshape(x.shape[0], sharding.head_parts, -1, sharding.page_parts, *x.shape[2:])
        return parts.swapaxes(2, 3).reshape(x.shape)

    return _reordered(pool, sharding, ordered)


def _reordered(pool: LayerCache, sharding: PageSharding, ordered: Any) -> LayerCache:
    if max(sharding.page_parts, pool.sharding.page_parts) == 1:
        return pool.replace(sharding=sharding)
    scales = pool.scales and dataclasses.replace(pool.scales, v=ordered(pool.scales.v))
    return pool.replace(kv=jax.tree.map(ordered, pool.kv), scales=scales, sharding=sharding)
