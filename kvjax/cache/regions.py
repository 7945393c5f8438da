"""Regions of a pool: whole pages of one row of the batch, taken out as rows and put back changed, in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.cache.key_channels import cut, spread
from kvjax.cache.pool import LayerCache
from kvjax.cache.quantisation import quantise_keys, quantise_values

#: Rows of one row of the batch, by name: "k" and "v" [H, N, D], every mark [H, N, 1].
Region = dict[str, Array]


def take_pages(
    cache: LayerCache, row: Int[Array, ""], slot: Int[Array, ""], count: int
) -> tuple[Region, Int[Array, ""]]:
    """Whole pages of one row that hold slots ``slot .. slot + count - 1`` of every head, as rows.

    Returns:
      ``(rows by name, first page within the run)``; N is static. :func:`put_pages` writes them back in place.
    """
    assert cache.row_starts is None, "what compacts a row has runs of its own size"
    page_size, heads = cache.page_size, len(cache.pages)
    pages = min((count + page_size - 2) // page_size + 1, min(cache.pages))
    first = jnp.minimum(slot // page_size, min(cache.pages) - pages)
    index = jnp.asarray(cache.starts, jnp.int32)[:, None] + first + jnp.arange(pages)
    held, here = cache.sharding.locate(index, sum(cache.pages))
    k, v = cache.kv.at_pages((row, held))
    if cache.scales is not None:
        k, v = k * cache.scales.k[row][:, None, None], v * cache.scales.v[row, held][..., None]
    if cache.channels is not None:
        k = spread(k[None], cache.channels[row][None], v.shape[-1])[0]
    if cache.sharding.page_axes:
        k, v = (
            cache.sharding.sum_over_pages(jnp.where(here[..., None, None], x, jnp.zeros((), x.dtype))) for x in (k, v)
        )
    region = {"k": k.reshape(heads, -1, k.shape[-1]), "v": v.reshape(heads, -1, v.shape[-1])}
    region |= {name: mark[row, index].reshape(heads, -1, 1) for name, mark in cache.marks.items()}
    return region, first


def put_pages(cache: LayerCache, row: Int[Array, ""], first: Int[Array, ""], region: Region) -> LayerCache:
    """Write back what :func:`take_pages` gave, changed."""
    page_size, scales = cache.page_size, cache.scales
    k, v = region["k"], region["v"]
    if cache.channels is not None:
        k = cut(k[None], cache.channels[row][None])[0]
    if scales is not None:
        # Rows that were stored come back to the same numbers: nothing is clipped here.
        k = quantise_keys(k[None], scales.k[row][None])[0][0]
        v, scale = (x[0] for x in quantise_values(v[None]))
    k, v = (x.reshape(x.shape[0], -1, page_size, x.shape[2]) for x in (k, v))
    index = jnp.asarray(cache.starts, jnp.int32)[:, None] + first + jnp.arange(k.shape[1])
    held, _ = cache.sharding.locate(index, sum(cache.pages))
    if scales is not None:
        scale = scale.reshape(*index.shape, page_size)
        scales = dataclasses.replace(scales, v=scales.v.at[row, held].set(scale, mode="drop"))
    marks = {
        name: mark.at[row, index].set(region[name].reshape(*index.shape, page_size).astype(mark.dtype))
        for name, mark in cache.marks.items()
    }
    return cache.replace(kv=cache.kv.set_pages(row, held, k, v), marks=marks, scales=scales)


def each(regions: Sequence[Region], change: Callable[[Region], Region]) -> list[Region]:
    """``change`` of every region, all of one shape: one after another in a loop, so that it is compiled once."""
    if len(regions) == 1:
        return [change(regions[0])]

    def changed(i: Int[Array, ""], stacked: Region) -> Region:
        new = change({name: jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for name, x in stacked.items()})
        return {name: jax.lax.dynamic_update_index_in_dim(x, new[name], i, 0) for name, x in stacked.items()}

    stacked = {name: jnp.stack([region[name] for region in regions]) for name in regions[0]}
    stacked = jax.lax.fori_loop(0, len(regions), changed, stacked)
    return [{name: x[i] for name, x in stacked.items()} for i in range(len(regions))]
