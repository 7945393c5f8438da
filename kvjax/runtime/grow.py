"""Repacks a cache into the next new-token bucket, when a growing policy outlives its allocation."""

from __future__ import annotations

from kvjax.cache.cache import Cache, resize_layer
from kvjax.cache.groups import rounded
from kvjax.policies.page_capacities import page_capacities
from kvjax.sharding.compile import Device


def grow(device: Device, cache: Cache, *, new_capacity: int) -> Cache:
    """The same contents with room for ``new_capacity`` tokens decoded after the last prompt.

    No head shrinks, and none grows whose policy keeps the size that its first prompt gave it. Old and new pools are
    alive together while this runs.
    """
    config = device.local_config
    capacities = cache.prompt_capacity, new_capacity, cache.page_size, cache.own_capacity
    wanted = page_capacities(cache.policy, config, *capacities)
    layers = []
    for i, (layer, pages) in enumerate(zip(cache.layers, wanted, strict=True)):
        owners = cache.policy.owners(config, i) * layer.model_layers
        heads = zip(layer.pages, rounded(layer, pages), owners, strict=True)
        sizes = tuple(max(old, new) if owner.grows or owner.replans else old for old, new, owner in heads)
        layers.append(resize_layer(layer, sizes))
    return cache.replace(layers=tuple(layers), new_capacity=new_capacity)
