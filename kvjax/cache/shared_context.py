"""A context that all rows of a batch share: the first slots of their heads, held once and never written.

Rows that begin with the same tokens hold the same keys and values, as far as their policy will never choose among them
again. These slots are a pool of a batch of one beside the rows' own pools, which hold what each row adds; attention
reads the shared pool once for all rows, and merges the two by log-sum-exp. To a policy a row's own pool is a layer
like any other: only lengths are shorter, by the slots that are shared.

Programs are given a shared context and never donate, change or return it, so any number of caches may hold the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.array_bytes import nbytes
from kvjax.cache.groups import HeadGroups, Layer, parts
from kvjax.cache.host_memory import as_numpy
from kvjax.cache.layer_view import layer_view, layer_views
from kvjax.cache.packing import store
from kvjax.cache.pool import LayerCache, keys_and_values, mark_by_head

#: A layer's shared pools, one for each of its pools; None where rows hold all of theirs.
SharedLayer = tuple[LayerCache | None, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedContext:
    """Slots that come before those of every row of a cache.

    Attributes:
      layers: of each layer its shared pools, with a batch of 1; where all layers share their slots one pool of all of
        them, see :meth:`by_layer`.
      seen: [C] int32, C = 1, tokens they and the first of the rows' own slots come from.
      most_tokens: the most that a head may hold of a pool of all layers; static.
    """

    layers: tuple[SharedLayer, ...]
    seen: Int[Array, " C"]
    most_tokens: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def whole(self) -> LayerCache | None:
        """The pool of all layers, if they share their slots."""
        pool = self.layers[0][0]
        return pool if pool is not None and pool.model_layers > 1 else None

    def by_layer(self) -> list[SharedLayer]:
        """The shared pools of each layer of the model."""
        if self.whole is None:
            return list(self.layers)
        return [(view,) for view in layer_views(self.whole, self.most_tokens)]

    def one_layer(self, index: int) -> SharedContext:
        """A context with what :meth:`of_layer` needs of a layer: its own pools, or the one of all layers."""
        return self if self.whole is not None else dataclasses.replace(self, layers=self.layers[index : index + 1])

    def of_layer(self, index: Int[Array, ""]) -> SharedLayer:
        """The shared pools of the layer that :meth:`one_layer` was asked for, by a number that a program is given."""
        return self.layers[0] if self.whole is None else (layer_view(self.whole, self.most_tokens, index),)

    @property
    def pools(self) -> tuple[LayerCache, ...]:
        """Every shared pool of every layer."""
        return tuple(pool for layer in self.layers for pool in layer if pool is not None)

    @property
    def nbytes(self) -> int:
        """Allocated bytes, on a mesh of everything once."""
        return nbytes(self)

    @property
    def live_nbytes(self) -> int:
        """Bytes of the slots that hold a token."""
        return sum(int(as_numpy(pool.length)[0].sum()) * pool.slot_nbytes for pool in self.pools)

    def lengths(self, layers: Sequence[Layer]) -> list[np.ndarray]:
        """[H] shared slots of each KV head, by layer of the model, of a cache of these layers."""
        if self.whole is not None:
            return np.split(as_numpy(self.whole.length)[0], self.whole.model_layers)
        return [_length(*each) for each in zip(self.layers, layers, strict=True)]


def _length(pools: SharedLayer, layer: Layer) -> np.ndarray:
    shared = zip(pools, parts(layer), strict=True)
    held: list[Any] = [
        np.zeros((1, len(own.pages)), np.int32) if one is None else as_numpy(one.length) for one, own in shared
    ]
    return np.asarray(layer.join(held) if isinstance(layer, HeadGroups) else held[0])[0]


def first_slots(pool: LayerCache, count: Int[Array, "B H"], pages: tuple[int, ...]) -> LayerCache:
    """The first ``count`` slots of each head, in runs of these pages, as a pool to be shared."""
    k, v = keys_and_values(pool)
    return store(pool.replace(state=None), k, v, count, pages, {name: mark_by_head(pool, name) for name in pool.marks})


def slots_from(pool: LayerCache, first: Int[Array, "B H"], pages: tuple[int, ...]) -> LayerCache:
    """The slots of each head from ``first`` on, moved to the beginning of runs of these pages."""
    k, v = keys_and_values(pool)
    source = jnp.minimum(first[..., None] + jnp.arange(max(pages) * pool.page_size), k.shape[2] - 1)
    k, v = (jnp.take_along_axis(x, source[..., None], axis=2) for x in (k, v))
    marks = {name: jnp.take_along_axis(mark_by_head(pool, name), source, axis=2) for name in pool.marks}
    return store(pool, k, v, pool.length - first, pages, marks)


def after_shared(shared: LayerCache, own: LayerCache, pages: tuple[int, ...]) -> LayerCache:
    """The shared slots and each row's own after them, in one pool of these pages: what the rows would hold alone."""
    first, batch = shared.length, own.length.shape[0]
    slots = max(pages) * own.page_size
    place = jnp.arange(slots)

    def joined(old: Array, new: Array) -> Array:
        """[B, H, slots, ...] of [1, H, C, ...] and [B, H, N, ...]."""
        before = jnp.broadcast_to(_fitted(old, slots), (batch, *old.shape[1:2], slots, *old.shape[3:]))
        source = jnp.clip(place - first[..., None], 0, new.shape[2] - 1)
        source = jnp.broadcast_to(source, (batch, *source.shape[1:]))
        wide = (..., *(None,) * (new.ndim - 3))
        after = jnp.take_along_axis(new, source[wide], axis=2)
        return jnp.where((place < first[..., None])[wide], before, after)

    k, v = (joined(old, new) for old, new in zip(keys_and_values(shared), keys_and_values(own), strict=True))
    marks = {name: joined(mark_by_head(shared, name), mark_by_head(own, name)) for name in own.marks}
    return store(own, k, v, own.length + first, pages, marks)


def _fitted(x: Array, slots: int) -> Array:
    """[B, H, N, ...] cut or padded with zeros to this many slots."""
    x = x[:, :, :slots]
    return jnp.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[2])) + ((0, 0),) * (x.ndim - 3))
