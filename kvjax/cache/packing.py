"""Packing of a pool: rows of heads laid out as pages, and pages laid out anew in runs of other sizes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import runs
from kvjax.cache.key_channels import cut, spread
from kvjax.cache.pool import LayerCache, by_page
from kvjax.cache.quantisation import key_scale, quantise_keys, quantise_values
from pallas_kernels.pages import Pages


def store(
    cache: LayerCache,
    k: Float[Array, "B H N D"],
    v: Float[Array, "B H N D"],
    length: Int[Array, "B H"],
    pages: tuple[int, ...],
    marks: Mapping[str, Array] | None = None,
) -> LayerCache:
    """The layer with these rows and no others: slot i of head h is row i, ``length`` of them; ``next`` follows them.

    Fixes the scales of int8 keys, and cuts keys to ``cache.channels``. A mark that is not given ([B, H, N] by name)
    becomes 0.
    """
    cache = cache.replace(pages=pages)
    if cache.row_starts is not None:
        starts = runs.fitted(length, sum(pages), cache.page_size, cache.sharding.page_parts)
        cache = cache.replace(row_starts=starts)
    return lay_out(cache, k, v, length, marks or {})


def lay_out(
    cache: LayerCache,
    k: Float[Array, "B H N D"],
    v: Float[Array, "B H N D"],
    length: Int[Array, "B H"],
    given: Mapping[str, Array],
) -> LayerCache:
    """:func:`store` in the runs that the layer says; what its arrays held before counts only for its keys' scales."""
    scales, sharding, pages = cache.scales, cache.sharding, cache.pages
    if scales is not None:
        valid = jnp.arange(k.shape[2]) < length[..., None]
        # Of all channels, stored or not: both of a rotary pair share a scale.
        old = spread(scales.k[:, :, None], cache.channels, k.shape[3])[:, :, 0]
        fixed = key_scale(k, valid, old, scales.headroom)
        fixed = cut(fixed[:, :, None], cache.channels)[:, :, 0]
        k, _ = quantise_keys(cut(k, cache.channels), fixed)
        v, scale = quantise_values(v)
        scales = dataclasses.replace(scales, k=fixed, v=sharding.local_pages(by_page(cache, scale)))
    else:
        k = cut(k, cache.channels)
    new_marks = {}
    for name, mark in cache.marks.items():
        values = given.get(name, jnp.zeros(k.shape[:3], mark.dtype))
        new_marks[name] = by_page(cache, values.astype(mark.dtype))
    k, v = (sharding.local_slots(x, cache.page_size) for x in (k, v))
    kv = pack(k, v, sharding.local_counts(pages), cache.kv, sharding.local_starts(cache.row_starts))
    return cache.replace(kv=kv, length=length, next=length, marks=new_marks, scales=scales)


def pack(
    k: Float[Array, "B H N K"] | Int[Array, "B H N K"],
    v: Float[Array, "B H N D"] | Int[Array, "B H N D"],
    pages: tuple[int, ...],
    like: Pages,
    row_starts: Int[Array, "B H"] | None = None,
) -> Pages:
    """Lay rows, as they are stored, out as pages, in the layout and dtype of ``like``: slot i of head h is row i; rows
    beyond a head's run are cut, missing ones are zeros.
    """
    page_size = like.shape[2]
    if row_starts is not None:
        return like.of_rows(*(runs.paged(x.astype(like.dtype), row_starts, sum(pages), page_size) for x in (k, v)))

    def lay(x: Array, count: int) -> Array:
        batch, heads, length, dim = x.shape
        room = count * page_size
        x = x[:, :, :room] if length >= room else jnp.pad(x, ((0, 0), (0, 0), (0, room - length), (0, 0)))
        return x.astype(like.dtype).reshape(batch, heads * count, page_size, dim)

    k_runs, v_runs = [], []
    for first, last in _equal_runs(pages):
        k_runs.append(lay(k[:, first:last], pages[first]))
        v_runs.append(lay(v[:, first:last], pages[first]))
    k_pool = k_runs[0] if len(k_runs) == 1 else jnp.concatenate(k_runs, axis=1)
    v_pool = v_runs[0] if len(v_runs) == 1 else jnp.concatenate(v_runs, axis=1)
    return like.of_rows(k_pool, v_pool)


def _equal_runs(pages: tuple[int, ...]) -> list[tuple[int, int]]:
    """Ranges of consecutive heads that own equally many pages."""
    edges = [0, *(i for i in range(1, len(pages)) if pages[i] != pages[i - 1]), len(pages)]
    return list(itertools.pairwise(edges))


def resize(cache: LayerCache, pages: tuple[int, ...]) -> LayerCache:
    """The same contents in runs of other sizes (no head may hold more than its new run)."""
    if pages == cache.pages:
        return cache
    if cache.row_starts is not None:
        return lay_anew(cache, pages, cache.sharding.page_parts)

    def lay(pool: Array, parts: int) -> Array:
        found = []
        for start, old, new in zip(cache.starts, cache.pages, pages, strict=True):
            run = pool[:, start // parts : (start + min(old, new)) // parts]
            found.append(jnp.pad(run, ((0, 0), (0, new // parts - run.shape[1])) + ((0, 0),) * (pool.ndim - 2)))
        return jnp.concatenate(found, axis=1)

    return _moved(cache, lay, pages)


def lay_anew(cache: LayerCache, pages: tuple[int, ...], parts: int) -> LayerCache:
    """A pool whose rows have their own runs, in runs that fit its lengths now, multiples of ``parts``."""
    assert cache.row_starts is not None
    old = cache.row_starts
    new = runs.fitted(cache.length, sum(pages), cache.page_size, parts)
    moved = _moved(cache, lambda pool, parts: runs.moved(pool, old // parts, new // parts, sum(pages) // parts), pages)
    return moved.replace(row_starts=new)


def _moved(cache: LayerCache, lay: Callable[[Array, int], Array], pages: tuple[int, ...]) -> LayerCache:
    """The pool with all that belongs to pages laid out by ``lay(numbers by page, devices that shard the pages)``."""
    # A page stays on its device, so one device's pages are laid out like those of a whole pool.
    parts = cache.sharding.page_parts
    scales = cache.scales and dataclasses.replace(cache.scales, v=lay(cache.scales.v, parts))
    marks = {name: lay(mark, 1) for name, mark in cache.marks.items()}
    return cache.replace(kv=jax.tree.map(lambda x: lay(x, parts), cache.kv), pages=pages, marks=marks, scales=scales)
