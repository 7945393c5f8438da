"""One layer's cache: pages of keys and values in which every KV head owns a contiguous run of its own static size.

How a page's keys and values lie in memory is ``layout.py``'s choice; every function here takes and gives
vectors of D channels.

Head h owns pages ``starts[h] : starts[h + 1]``; the run is the same for every row, so the batch and the heads shard
without index games. Where the heads of a layer share its slots, each row has its own runs (``row_starts``, see
``runs.py``), of as many pages together. What a head *may* hold (its run, from the plan) and what it *does* hold
(``length``, traced) are two things. Valid slots are ``0 .. length - 1``; pools start as zeros, so what is masked is
always finite.

On a mesh of devices a pool may hold some of the pages (``page_sharding.py``, ``pool_sharding.py``); its ``pages`` and
``marks`` are of all.

Keys and values may be stored as int8 (``quantisation.py``), and keys with some channels only (``key_channels.py``);
every function here takes and gives real numbers of all channels, so that a policy never knows. Numbers that belong to a
slot (its token's position, a score) are ``marks`` and move with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import runs
from kvjax.cache.key_channels import cut, spread
from kvjax.cache.layout import COLUMNS, Layout, layout_of, platform_layout
from kvjax.cache.page_sharding import UNSHARDED, PageSharding
from kvjax.cache.quantisation import MODEL, Scales, Storage, quantise_keys, quantise_values
from pallas_kernels.pages import Pages

#: Slots of a page on a CPU.
PAGE_SIZE = COLUMNS.page_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values one layer has kept, with the state its policy needs.

    Attributes:
      kv: keys after rotary embedding and values, in P pages of R slots for each of B rows; int8 when there are
        ``scales``.
      length: [B, H] int32, valid slots of each head.
      next: [B, H] int32, the slot the next token is written to; ``length`` unless the policy reuses slots.
      log_mass: [B, H] float32 added to the logit of slot 0, or ``None``: log N of a slot that stands for N tokens.
      state: a pytree of the policy's own arrays, or ``None``.
      pages: pages of each head, static; with ``row_starts`` only their sum counts, the pages of a row.
      marks: [B, P, R] one number a slot by name: "position" (int32) of the token in it, "score" (float32) and what else
        a policy declares.
      scales: of an int8 pool, or ``None``.
      sharding: which of the pages this device holds, static.
      row_starts: [B, H] the first page of each head's run in each row, or ``None`` where all rows have the same runs.
      channels: [B, H, K] int32, rising: the key channels that are stored, or ``None`` where all are.
      model_layers: layers of the model whose heads these are, one layer's after the other's; static. More than one only
        where all layers share their slots (``layer_view.py``); ``state`` is then a tuple of each one's.
    """

    kv: Pages
    length: Int[Array, "B H"]
    next: Int[Array, "B H"]
    log_mass: Float[Array, "B H"] | None
    state: Any
    pages: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    marks: dict[str, Array] = dataclasses.field(default_factory=dict)
    scales: Scales | None = None
    sharding: PageSharding = dataclasses.field(default=UNSHARDED, metadata={"static": True})
    row_starts: Int[Array, "B H"] | None = None
    channels: Int[Array, "B H K"] | None = None
    model_layers: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot of one head: key, value, marks and the value's scale."""
        return (
            self.kv.slot_nbytes + sum(mark.dtype.itemsize for mark in self.marks.values()) + (4 if self.scales else 0)
        )

    @property
    def dtype(self) -> Any:
        """Dtype of the keys and values this layer gives: the pool's, or float32 for an int8 one."""
        return jnp.float32 if self.scales else self.kv.dtype

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.kv.shape[2]

    @property
    def layout(self) -> Layout:
        """How its pages lie in memory."""
        return layout_of(self.kv)

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of each head: its allocation in tokens; an equal part where rows have their own runs."""
        return tuple(n * self.page_size for n in self.pages)

    @property
    def most_pages(self) -> int:
        """Pages that a head has at most, in any row."""
        if self.row_starts is None:
            return max(self.pages)
        return sum(self.pages) - len(self.pages) + 1

    @property
    def most_slots(self) -> tuple[int, ...]:
        """Slots that each head has at most, in any row."""
        return self.slots if self.row_starts is None else (self.most_pages * self.page_size,) * len(self.pages)

    @property
    def row_ends(self) -> Int[Array, "B H"]:
        """One past the last page of each head's run, where rows have their own."""
        assert self.row_starts is not None
        return runs.ends(self.row_starts, sum(self.pages))

    @property
    def starts(self) -> tuple[int, ...]:
        """First page of each head's run."""
        return tuple(int(n) for n in np.cumsum((0, *self.pages))[:-1])

    @property
    def uniform(self) -> bool:
        """Whether all heads own equally many pages, in every row."""
        return self.row_starts is None and len(set(self.pages)) == 1

    def replace(self, **changes: Any) -> LayerCache:
        return dataclasses.replace(self, **changes)


def pages_for(tokens: int, page_size: int = PAGE_SIZE) -> int:
    """Pages that hold ``tokens`` slots; at least one, so that every head has a place to write."""
    return max(1, -(-tokens // page_size))


def layout_for(storage: Storage, head_dim: int) -> Layout:
    """The layout that a cache is made in: the one that was asked for, or the platform's."""
    return storage.layout or platform_layout(head_dim)


def empty_layer(
    batch: int,
    pages: tuple[int, ...],
    head_dim: int,
    dtype: DTypeLike,
    state: Any = None,
    log_mass: bool = False,
    marks: tuple[str, ...] = (),
    storage: Storage = MODEL,
    by_row: bool = False,
) -> LayerCache:
    """A layer that holds nothing: zeros, never uninitialised memory, because 0 x NaN would leak through a mask.

    ``by_row``: each row will have its own runs.
    """
    total, heads, layout = sum(pages), len(pages), layout_for(storage, head_dim)
    scales = None
    if storage.quantised:
        dtype = jnp.int8
        scales = Scales(
            k=jnp.zeros((batch, heads, head_dim), jnp.float32),
            v=jnp.zeros((batch, total, layout.page_size), jnp.float32),
            clipped=jnp.zeros((batch, heads), jnp.int32),
            headroom=storage.headroom,
        )
    length = jnp.zeros((batch, heads), jnp.int32)
    return LayerCache(
        kv=layout.zeros(batch, total, head_dim, dtype),
        length=length,
        next=jnp.zeros((batch, heads), jnp.int32),
        log_mass=jnp.zeros((batch, heads), jnp.float32) if log_mass else None,
        state=state,
        pages=pages,
        marks={name: jnp.zeros((batch, total, layout.page_size), mark_dtype(name)) for name in marks},
        scales=scales,
        row_starts=runs.fitted(length, total, layout.page_size) if by_row else None,
    )


def with_key_channels(pool: LayerCache, count: int) -> LayerCache:
    """An empty pool like this one that stores ``count`` channels of each key; which ones, is to be chosen."""
    batch, pages, _, dim = pool.kv.shape
    heads = len(pool.pages)
    kv = pool.layout.with_key_channels(count, dim).zeros(batch, pages, dim, pool.kv.dtype, count)
    scales = pool.scales and dataclasses.replace(pool.scales, k=jnp.zeros((batch, heads, count), jnp.float32))
    channels = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, heads, count))
    return pool.replace(kv=kv, scales=scales, channels=channels)


def mark_dtype(name: str) -> Any:
    """Positions are whole numbers, every other mark is float32."""
    return jnp.int32 if name.startswith("position") else jnp.float32


def write(
    cache: LayerCache,
    k: Float[Array, "B H N D"],
    v: Float[Array, "B H N D"] | None,
    slots: Int[Array, "B H N"],
    valid: Bool[Array, "B H N"] | Bool[Array, "B 1 1"],
    marks: Mapping[str, Array] | None = None,
) -> LayerCache:
    """Write rows into slots in place (a donated pool is aliased, not copied); rows that are not valid go nowhere.

    ``v=None`` writes keys only, and leaves the slots' marks; otherwise ``marks`` gives [B, H, N] numbers by name, and a
    mark that is not given becomes 0. Slots of one head must differ among the valid rows. Lengths are the caller's.
    """
    places = _places(cache, slots, valid)
    held, scales, k = _held(cache, places), cache.scales, cut(k, cache.channels)
    if scales is not None:
        k, clipped = quantise_keys(k, scales.k)
        scales = dataclasses.replace(scales, clipped=scales.clipped + (clipped & valid).sum(axis=2, dtype=jnp.int32))
    cache = cache.replace(kv=cache.kv.set_keys(held, k), scales=scales)
    if v is None:
        return cache
    if scales is not None:
        v, scale = quantise_values(v)
        scales = dataclasses.replace(scales, v=scales.v.at[held].set(scale, mode="drop"))
    given = marks or {}
    new_marks = {
        name: mark.at[places].set(given.get(name, jnp.zeros((), mark.dtype)), mode="drop")
        for name, mark in cache.marks.items()
    }
    return cache.replace(kv=cache.kv.set_values(held, v), scales=scales, marks=new_marks)


def write_mark(
    cache: LayerCache,
    name: str,
    values: Array,
    slots: Int[Array, "B H N"],
    valid: Bool[Array, "B H N"] | Bool[Array, "B 1 1"],
) -> LayerCache:
    """Write one mark of slots, [B, H, N] values, and nothing else of them; see :func:`write`."""
    mark = cache.marks[name].at[_places(cache, slots, valid)].set(values, mode="drop")
    return cache.replace(marks={**cache.marks, name: mark})


def _places(cache: LayerCache, slots: Array, valid: Array) -> tuple[Array, Array, Array]:
    """Indices of slots into [B, P, R]; those that are not valid are out of range, so that a scatter drops them."""
    rows, _, page_size, _ = cache.kv.shape
    page = _starts(cache)[..., None] + slots // page_size
    if cache.row_starts is not None:  # the next run is another head's
        valid = valid & (page < cache.row_ends[..., None])
    batch = jnp.arange(rows)[:, None, None]
    return batch, jnp.where(valid, page, sum(cache.pages)), slots % page_size


def _starts(cache: LayerCache) -> Int[Array, "*B H"]:
    """The first page of each head's run, of all rows or of each."""
    return jnp.asarray(cache.starts, jnp.int32) if cache.row_starts is None else cache.row_starts


def _held(cache: LayerCache, places: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """Indices into this device's pages of those places that are on it; the others are out of range."""
    batch, page, slot = places
    return batch, cache.sharding.locate(page, sum(cache.pages))[0], slot


def append_token(
    cache: LayerCache,
    k: Float[Array, "B H D"],
    v: Float[Array, "B H D"],
    active: Bool[Array, " B"],
    marks: Mapping[str, Array] | None = None,
) -> LayerCache:
    """Write one token per row at ``next`` and count it; rows that are not active keep their bytes and lengths.

    A write at ``length`` makes the head one longer; a write below it replaces a slot. ``next`` is left to the caller.
    ``marks`` gives [B, H] numbers by name.
    """
    here, wide = active[:, None, None], {name: mark[:, :, None] for name, mark in (marks or {}).items()}
    written = write(cache, k[:, :, None], v[:, :, None], cache.next[:, :, None], here, wide)
    longer = jnp.where(active[:, None], jnp.maximum(cache.length, cache.next + 1), cache.length)
    return written.replace(length=longer)


def read_slots(cache: LayerCache, slots: Int[Array, "B H"]) -> tuple[Float[Array, "B H D"], Float[Array, "B H D"]]:
    """Key and value of one slot of every head, float32."""
    page_size, sharding = cache.page_size, cache.sharding
    page, here = sharding.locate(_starts(cache) + slots // page_size, sum(cache.pages))
    places = jnp.arange(cache.kv.shape[0])[:, None], page, slots % page_size
    k, v = (x.astype(jnp.float32) for x in (cache.kv.key_at(places), cache.kv.value_at(places)))
    if cache.scales is not None:
        k, v = k * cache.scales.k, v * cache.scales.v[places][..., None]
    k = spread(k[:, :, None], cache.channels, v.shape[-1])[:, :, 0]
    if sharding.page_axes:
        k, v = (sharding.sum_over_pages(jnp.where(here[..., None], x, 0.0)) for x in (k, v))
    return k, v


def by_head(cache: LayerCache, pages: Array) -> Array:
    """[B, P, ..., R] numbers a page brought to their heads: [B, H, ..., C], C the longest head's slots, 0 beyond a run.

    Trailing axes before R stay between H and C.
    """
    found = jnp.moveaxis(_runs(cache, pages), 2, -2)
    return found.reshape(*found.shape[:-2], -1)


def _runs(cache: LayerCache, pages: Array) -> Array:
    """[B, P, ...] as [B, H, pages of the longest run, ...], zeros beyond a shorter run."""
    if cache.uniform:
        return pages.reshape(pages.shape[0], len(cache.pages), max(cache.pages), *pages.shape[2:])
    where, inside = _places_of_runs(cache)
    return _inside(pages[where], inside)


def _places_of_runs(cache: LayerCache) -> tuple[Any, Any]:
    """Index into [B, P] of every head's pages, [B, H, pages of the longest run], and which of them there are."""
    longest = cache.most_pages
    if cache.row_starts is not None:
        index, inside = runs.of_heads(cache.row_starts, cache.row_ends, longest)
        return (jnp.arange(index.shape[0])[:, None, None], index), inside
    index = np.asarray(cache.starts)[:, None] + np.arange(longest)
    inside = np.arange(longest) < np.asarray(cache.pages)[:, None]
    return (slice(None), np.where(inside, index, 0)), inside


def _inside(found: Array, inside: Any) -> Array:
    return jnp.where(inside.reshape(*inside.shape, *(1,) * (found.ndim - 3)), found, jnp.zeros((), found.dtype))


def by_page(cache: LayerCache, heads: Array) -> Array:
    """Undo :func:`by_head`: [B, H, ..., N] to [B, P, ..., R], cut to each head's run, 0 where N is shorter."""
    if cache.row_starts is not None:
        found = runs.paged(jnp.moveaxis(heads, -1, 2), cache.row_starts, sum(cache.pages), cache.page_size)
        return jnp.moveaxis(found, 2, -1)
    longest, size = max(cache.pages), cache.page_size
    length = heads.shape[-1]
    fill = [(0, 0)] * (heads.ndim - 1) + [(0, max(longest * size - length, 0))]
    heads = jnp.pad(heads, fill)[..., : longest * size]
    found = jnp.moveaxis(heads.reshape(*heads.shape[:-1], longest, size), -2, 2)
    if cache.uniform:
        return found.reshape(found.shape[0], -1, *found.shape[3:])
    return jnp.concatenate([found[:, h, :count] for h, count in enumerate(cache.pages)], axis=1)


def mark_by_head(cache: LayerCache, name: str) -> Array:
    """[B, H, C] a mark of every slot."""
    return by_head(cache, cache.marks[name])


def stored_keys_and_values(cache: LayerCache) -> tuple[Array, Array]:
    """:func:`keys_and_values` of a whole pool as they are stored: int8 without scales, keys of K channels."""
    if cache.uniform:
        k, v = (_runs(cache, x) for x in (cache.kv.keys(), cache.kv.values()))
    else:
        where, inside = _places_of_runs(cache)
        k, v = (_inside(x, inside) for x in cache.kv.at_pages(where))
    k, v = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (k, v))
    return k, v


def keys_and_values(cache: LayerCache) -> tuple[Float[Array, "B H C D"], Float[Array, "B H C D"]]:
    """Keys and values of every slot as rows, [B, H, C, D] with C the longest head's slots; shorter heads end in zeros.

    A copy, for selecting again on a later turn; attention reads the pages.
    """
    if cache.row_starts is not None and cache.sharding.page_axes:
        k, v, v_scale = _gathered(cache)
    else:
        cache = gather_pages(cache)
        k, v = stored_keys_and_values(cache)
        v_scale = None if cache.scales is None else by_head(cache, cache.scales.v)
    if cache.scales is not None and v_scale is not None:
        scale = v_scale[..., None]
        k, v = k.astype(jnp.float32) * cache.scales.k[:, :, None], v.astype(jnp.float32) * scale
    return spread(k, cache.channels, v.shape[-1]), v


def _gathered(cache: LayerCache) -> tuple[Array, Array, Array | None]:
    """:func:`stored_keys_and_values`, and the scales of values by head, where rows have runs of their own: of these
    alone each device hands over its pages, not of the pool, which may hold more than these heads."""
    assert cache.row_starts is not None
    sharding, most, parts = cache.sharding, cache.most_pages, cache.sharding.page_parts
    first, after = cache.row_starts // parts, cache.row_ends // parts
    index, _ = runs.of_heads(first, after, -(-most // parts))
    where = jnp.arange(len(index))[:, None, None], index
    _, inside = runs.of_heads(cache.row_starts, cache.row_ends, most)

    def gathered(own: Array) -> Array:
        whole = sharding.gather(own.reshape(len(own), -1, *own.shape[3:]))
        found = _inside(whole.reshape(*own.shape[:2], -1, *own.shape[3:])[:, :, :most], inside)
        return found.reshape(*found.shape[:2], -1, *found.shape[4:])

    k, v = (gathered(x) for x in cache.kv.at_pages(where))
    return k, v, None if cache.scales is None else gathered(cache.scales.v[where])


def gather_pages(pool: LayerCache) -> LayerCache:
    """The pool with all pages of this device's heads; inside ``jax.shard_map``."""
    sharding = pool.sharding
    if not sharding.page_axes:
        return pool
    scales = pool.scales and dataclasses.replace(pool.scales, v=sharding.gather(pool.scales.v))
    return pool.replace(kv=jax.tree.map(sharding.gather, pool.kv), scales=scales, sharding=UNSHARDED)
