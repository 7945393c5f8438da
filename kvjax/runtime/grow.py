"""Repacking a cache into the next new-token bucket, when a growing policy outlives its allocation."""

from __future__ import annotations

import functools

import jax

from kvjax.cache.groups import rounded
from kvjax.cache.value import Cache, resize_layer
from kvjax.config import ModelConfig
from kvjax.policies.base import page_capacities


@functools.partial(jax.jit, static_argnames=("config", "new_room"))
def grow(cache: Cache, *, config: ModelConfig, new_room: int) -> Cache:
    """The same contents with room for ``new_room`` tokens decoded after the last prompt.

    No head shrinks; old and new pools are alive together while this runs.
    """
    return grown(cache, config, new_room)


def grown(cache: Cache, config: ModelConfig, new_room: int) -> Cache:
    """:func:`grow`, to be compiled."""
    wanted = page_capacities(cache.policy, config, cache.prompt_room, new_room, cache.page_size)
    layers = tuple(
        resize_layer(layer, tuple(max(old, new) for old, new in zip(layer.pages, rounded(layer, pages), strict=True)))
        for layer, pages in zip(cache.layers, wanted, strict=True)
    )
    return cache.replace(layers=layers, new_room=new_room)
