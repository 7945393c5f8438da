"""A layer's pool on the devices of a mesh: a device's part of an empty one, and pages in the order of the devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array

from kvjax.cache import runs
from kvjax.cache.packing import lay_anew
from kvjax.cache.page_sharding import UNSHARDED, PageSharding
from kvjax.cache.pool import LayerCache


def local_shard(pool: LayerCache, sharding: PageSharding) -> LayerCache:
    """The part of an empty pool that one device holds; the pages of each head must divide by the devices."""
    if sharding == UNSHARDED:
        return pool
    count = sum(sharding.local_counts(pool.pages))
    scales = pool.scales and dataclasses.replace(pool.scales, v=pool.scales.v[:, :count])
    starts = pool.row_starts
    if starts is not None:
        starts = runs.fitted(pool.length, sum(pool.pages), pool.page_size, sharding.page_parts)
    kv = jax.tree.map(lambda x: x[:, :count], pool.kv)
    return pool.replace(kv=kv, scales=scales, sharding=sharding, row_starts=starts)


def unshard(pool: LayerCache) -> LayerCache:
    """Put the arrays of all devices in the order of the pages of a pool that is not sharded."""
    sharding = pool.sharding

    def ordered(x: Array) -> Array:
        parts = x.reshape(x.shape[0], sharding.head_parts, sharding.page_parts, -1, *x.shape[2:])
        return parts.swapaxes(2, 3).reshape(x.shape)

    return _reordered(pool, UNSHARDED, ordered)


def shard(pool: LayerCache, sharding: PageSharding) -> LayerCache:
    """Undo :func:`unshard`: put the pages in the order in which the devices will hold them."""
    if pool.row_starts is not None and sharding.page_parts > 1:
        pool = lay_anew(pool, pool.pages, sharding.page_parts)

    def ordered(x: Array) -> Array:
        parts = x.reshape(x.shape[0], sharding.head_parts, -1, sharding.page_parts, *x.shape[2:])
        return parts.swapaxes(2, 3).reshape(x.shape)

    return _reordered(pool, sharding, ordered)


def _reordered(pool: LayerCache, sharding: PageSharding, ordered: Any) -> LayerCache:
    if max(sharding.page_parts, pool.sharding.page_parts) == 1:
        return pool.replace(sharding=sharding)
    scales = pool.scales and dataclasses.replace(pool.scales, v=ordered(pool.scales.v))
    return pool.replace(kv=jax.tree.map(ordered, pool.kv), scales=scales, sharding=sharding)
