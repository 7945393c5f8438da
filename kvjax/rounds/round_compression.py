"""Compresses a round by itself when it ends, under a policy of tokens, and deletes the slots of idle rounds.

A policy that scores tokens by a window of queries needs those queries, and the answer's were gone one by one: the last
tokens of the round, as many as its window, are read once more onto the cache without them. That costs a prefill of 32
tokens or so, and hands over exactly the signals of a prompt that ends there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.cache import Cache
from kvjax.cache.packing import store
from kvjax.cache.pool import LayerCache, keys_and_values
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder
from kvjax.policies.base import Policy, PromptChunk, gather_candidates
from kvjax.policies.page_capacities import page_capacities
from kvjax.policies.signals import Mass, PromptSignals
from kvjax.runtime.prefill import through_layers
from kvjax.runtime.signal_collector import signal_collector


def compressed(
    params: Decoder,
    cache: Cache,
    base: Int[Array, "L B H"],
    count: Int[Array, " B"],
    tokens: Int[Array, "B W"] | None = None,
    again: Int[Array, " B"] | None = None,
    *,
    inner: Policy,
    size: int,
) -> Cache:
    """The last ``count`` tokens of each row, which follow ``base`` slots, compressed as a prompt of their own.

    Args:
      tokens: the last ``again`` of those tokens, to be read once more; None for a policy that has no window.
      inner: chooses among them. size: a bucket that holds ``count``.
    """
    config = params.config
    closing = _Closing(inner, config, base, count, size)
    if tokens is None or again is None:
        layers = tuple(closing.own(i, layer, *keys_and_values(layer), None) for i, layer in enumerate(cache.layers))
        return cache.replace(layers=layers)
    shorter = tuple(
        layer.replace(length=layer.length - again[:, None], next=layer.next - again[:, None]) for layer in cache.layers
    )
    seen = cache.seen - again
    collector = signal_collector(inner, config, seen, again, cache.seen, tokens.shape[1], fresh=False)
    pages = tuple(layer.pages for layer in cache.layers)
    layers, _, _ = through_layers(
        params,
        closing,
        0,
        shorter,
        params.embed(tokens),
        seen,
        again,
        cache.seen,
        pages,
        fresh=False,
        collector=collector,
    )
    return cache.replace(layers=layers)


@dataclasses.dataclass(frozen=True)
class _Closing(Policy):
    """``inner`` on the tokens that follow ``base`` alone; lives inside one compiled program."""

    inner: Policy
    config: ModelConfig
    base: Any
    count: Any
    size: int

    def compress(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H T D"], v: Float[Array, "B H T D"], chunk: PromptChunk
    ) -> LayerCache:
        whole = gather_candidates(cache, k, v, chunk)
        return self.own(layer, cache, whole.k, whole.v, whole.signals.window)

    def own(
        self,
        layer: int,
        cache: LayerCache,
        k: Float[Array, "B H C D"],
        v: Float[Array, "B H C D"],
        mass: Float[Array, "B H G C"] | None,
    ) -> LayerCache:
        """The layer with the round's rows replaced by those that the policy keeps of them."""
        base, batch = self.base[layer], k.shape[0]
        index = jnp.minimum(base[..., None] + jnp.arange(self.size), k.shape[2] - 1)
        own_k, own_v = (jnp.take_along_axis(x, index[..., None], axis=2) for x in (k, v))
        signals = None
        if mass is not None:
            signals = PromptSignals(Mass(None, jnp.take_along_axis(mass, index[:, :, None], axis=3)))
        pages = page_capacities(self.inner, self.config, self.size, 1, cache.page_size)[layer]
        empty = self.inner.init_layer(self.config, layer, batch, pages, k.dtype)
        # On a mesh: of the heads that the cache has here, all pages.
        empty = empty.replace(sharding=dataclasses.replace(cache.sharding, page_axes=(), page_parts=1))
        zeros = jnp.zeros_like(self.count)
        chunk = PromptChunk(zeros, self.count, self.count, pages=pages, config=self.config, fresh=True, signals=signals)
        kept = self.inner.compress(layer, empty, own_k, own_v, chunk)

        def replaced(old: Array, new: Array) -> Array:
            old = jnp.pad(old, ((0, 0), (0, 0), (0, new.shape[2]), (0, 0)))
            return jax.vmap(jax.vmap(lambda x, y, n: jax.lax.dynamic_update_slice_in_dim(x, y, n, 0)))(old, new, base)

        new_k, new_v = (replaced(old, new) for old, new in zip((k, v), keys_and_values(kept), strict=True))
        return store(cache, new_k, new_v, base + kept.length, cache.pages)


def without_slots(cache: Cache, keep: Bool[Array, "L B H C"]) -> Cache:
    """The cache with only these slots of every layer, in order; positions stay."""
    layers = []
    for i, layer in enumerate(cache.layers):
        k, v = keys_and_values(layer)
        valid = keep[i, :, :, : k.shape[2]] & (jnp.arange(k.shape[2]) < layer.length[..., None])
        order = jnp.argsort(~valid, axis=-1, stable=True)[..., None]
        k, v = (jnp.take_along_axis(x, order, axis=2) for x in (k, v))
        layers.append(store(layer, k, v, valid.sum(axis=-1, dtype=jnp.int32), layer.pages))
    return cache.replace(layers=tuple(layers))
