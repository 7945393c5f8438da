"""A cache's canonical form: the slots that hold something, head after head, in one order on every platform.

Pages, their size and how they lie in memory (``kvjax/cache/layout.py``) are the platform's; what is saved on a CPU is
read on a TPU. Rows are saved as they are stored, int8 levels with their scales, so a cache comes back bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import runs
from kvjax.cache.cache import Cache
from kvjax.cache.groups import parts, with_parts
from kvjax.cache.pool import LayerCache, pages_for

#: Slots of each head that are saved, of every pool of every layer.
Counts = tuple[tuple[tuple[int, ...], ...], ...]

#: Fields of a cache and what version 1 of the file format calls them.
COUNTERS = {"seen": "seen", "prompt_end": "anchor", "next_token": "pending"}


def counts_of(cache: Cache) -> Counts:
    """The most slots that any row holds, of each head; reads the lengths from the device."""
    pools = [[np.asarray(pool.length) for pool in parts(layer)] for layer in cache.layers]
    return tuple(tuple(tuple(int(n) for n in length.max(axis=0)) for length in layer) for layer in pools)


@functools.partial(jax.jit, static_argnames=("counts",))
def canonical(cache: Cache, counts: Counts) -> dict[str, Any]:
    """A cache as plain dictionaries of arrays: "k" and "v" [B, S, D] of every pool, S the sum of its heads' counts.

    Keys have the channels that are stored.
    """
    layers = [
        [_pool(pool, count) for pool, count in zip(parts(layer), layer_counts, strict=True)]
        for layer, layer_counts in zip(cache.layers, counts, strict=True)
    ]
    return {"layers": layers, **{saved: getattr(cache, field) for field, saved in COUNTERS.items()}}


def restored(tree: dict[str, Any], empty: Cache, counts: Counts) -> Cache:
    """Undo :func:`canonical`: its rows in the pages of ``empty``, a cache of the same policy that holds nothing."""
    layers = []
    for saved, layer, layer_counts in zip(tree["layers"], empty.layers, counts, strict=True):
        pools = [_unpool(*given) for given in zip(parts(layer), saved, layer_counts, strict=True)]
        layers.append(with_parts(layer, pools))
    counters = {field: tree[saved] for field, saved in COUNTERS.items()}
    return empty.replace(layers=tuple(layers), **counters)


def checksum(tree: Any) -> int:
    """CRC-32 of all arrays of a tree, in order: what the disk gave back is what it was given."""
    found = 0
    for leaf in jax.tree.leaves(tree):
        found = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, found)
    return found


def _places(pool: LayerCache, count: Sequence[int]) -> Any:
    """[S] or [B, S] where the saved slots are among the pool's P R ones; out of range where a row has none."""
    within = [np.arange(n, dtype=np.int32) for n in count]
    if pool.row_starts is None:
        starts = np.asarray(pool.starts) * pool.page_size
        return np.concatenate([start + slot for start, slot in zip(starts, within, strict=True)]).astype(np.int32)
    head, slot = np.repeat(np.arange(len(count)), count), np.concatenate(within)
    place = pool.row_starts[:, head] * pool.page_size + slot
    return jnp.where(slot < pool.length[:, head], place, sum(pool.slots))


def _pool(pool: LayerCache, count: Sequence[int]) -> dict[str, Any]:
    places = _places(pool, count)

    def slots(pages: jax.Array) -> jax.Array:
        flat = pages.reshape(pages.shape[0], -1, *pages.shape[3:])
        if pool.row_starts is None:
            return flat[:, places]
        return jnp.take_along_axis(
            flat, places.reshape(*places.shape, *(1,) * (flat.ndim - 2)), 1, mode="fill", fill_value=0
        )

    tree: dict[str, Any] = {
        "k": slots(pool.kv.keys()),
        "v": slots(pool.kv.values()),
        "length": pool.length,
        "next": pool.next,
        "state": jax.tree.leaves(pool.state),
        "marks": {name: slots(mark) for name, mark in pool.marks.items()},
    }
    if pool.log_mass is not None:
        tree["log_mass"] = pool.log_mass
    if pool.channels is not None:
        tree["channels"] = pool.channels
    if pool.scales is not None:
        tree["scales"] = {"k": pool.scales.k, "v": slots(pool.scales.v), "clipped": pool.scales.clipped}
    return tree


def _unpool(pool: LayerCache, tree: dict[str, Any], count: Sequence[int]) -> LayerCache:
    batch, pages, page_size, _ = pool.kv.shape
    rows: Any = slice(None)
    if pool.row_starts is not None:
        pool = pool.replace(length=tree["length"], row_starts=runs.fitted(tree["length"], pages, page_size))
        rows = jnp.arange(batch)[:, None]
    places = _places(pool, count)

    def laid(slots: jax.Array) -> jax.Array:
        empty = jnp.zeros((batch, pages * page_size, *slots.shape[2:]), slots.dtype)
        return empty.at[rows, places].set(slots, mode="drop").reshape(batch, pages, page_size, *slots.shape[2:])

    scales = pool.scales
    if scales is not None:
        saved = tree["scales"]
        scales = dataclasses.replace(scales, k=saved["k"], v=laid(saved["v"]), clipped=saved["clipped"])
    return pool.replace(
        kv=pool.kv.of_rows(laid(tree["k"]), laid(tree["v"])),
        length=tree["length"],
        next=tree["next"],
        log_mass=tree.get("log_mass"),
        state=jax.tree.unflatten(jax.tree.structure(pool.state), tree["state"]),
        marks={name: laid(tree["marks"][name]) for name in pool.marks},
        scales=scales,
        channels=tree.get("channels"),
    )


def pages_of(slots: Sequence[int], page_size: int) -> tuple[int, ...]:
    """Pages that hold as many slots as a head had where it was saved."""
    return tuple(pages_for(count, page_size) for count in slots)
