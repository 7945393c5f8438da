"""Moves a cache to the devices that will continue it, whoever made it."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.cache.cache import Cache, materialised
from kvjax.cache.continuation import Continuation
from kvjax.cache.groups import Layer, parts, with_parts
from kvjax.cache.packing import resize
from kvjax.cache.page_sharding import UNSHARDED
from kvjax.cache.pool_sharding import shard, unshard
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.policies.fixed import materialised_chosen
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.partition import Partition
from kvjax.sharding.placement import cache_specs, leaves_of

C = TypeVar("C", bound=Continuation)


def adopt(continued: C, mesh: Mesh | None, config: ModelConfig) -> C:
    """A cache or conversation as this mesh (for None, one device) holds it; itself where it is held so already.

    Of a conversation of rounds the lower layers: its rounds go where the question that selects them is.
    """
    return continued.with_device_layers(_adopted(continued.device_layers, mesh, config))


def keeps_context(cache: Cache, mesh: Mesh | None, config: ModelConfig) -> bool:
    """Whether rows that share a context go on sharing it on this mesh: on other devices each would hold it."""
    return cache.context is not None and _is_on(cache, _part(cache, mesh, config))


def _part(cache: Cache, mesh: Mesh | None, config: ModelConfig) -> Partition | None:
    return None if mesh is None else Partition(mesh, config, cache.policy)


def _adopted(cache: Cache, mesh: Mesh | None, config: ModelConfig) -> Cache:
    part = _part(cache, mesh, config)
    if cache.context is not None and not _is_on(cache, part):
        # A shared context stays where it is.
        cache = materialised_chosen(cache) if cache.policy.chosen_once else materialised(cache)
    if not _held_so(cache, part):
        cache = _resharded(cache, part)
    if part is None:
        return jax.device_put(_on_host(cache), jax.devices()[0]) if _on_many(cache) else cache
    data = part.mesh.data

    def sharding(leaf: Any, spec: PartitionSpec) -> NamedSharding:
        rows = spec if leaf.shape[0] % data == 0 else PartitionSpec(None, *spec[1:])
        return NamedSharding(part.mesh.jax, rows)

    leaves, tree = jax.tree.flatten(cache)
    wanted = [sharding(leaf, spec) for leaf, spec in zip(leaves, leaves_of(cache_specs(cache)), strict=True)]
    moved = [
        leaf if _is_there(leaf, where) else jax.device_put(_on_host(leaf), where)
        for leaf, where in zip(leaves, wanted, strict=True)
    ]
    return jax.tree.unflatten(tree, moved)


def _is_there(leaf: Any, where: NamedSharding) -> bool:
    return isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(where, leaf.ndim)


def _is_on(cache: Cache, part: Partition | None) -> bool:
    """Whether a cache is held on these devices, and as they hold it."""
    devices = {jax.devices()[0]} if part is None else set(part.mesh.jax.devices.flat)
    return _held_so(cache, part) and isinstance(cache.seen, jax.Array) and cache.seen.sharding.device_set == devices


def _on_many(cache: Cache) -> bool:
    return not isinstance(cache.seen, jax.Array) or len(cache.seen.sharding.device_set) > 1


def _on_host(tree: Any) -> Any:
    """Arrays of all devices as NumPy's.

    What changes its devices goes through the host, leaf by leaf: programs that exchange parts between devices, one a
    leaf, would all be in flight at once, and those of virtual CPU devices then wait for each other for ever.
    """
    if any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in jax.tree.leaves(tree)):
        raise UsageError("A cache that is spread over several processes stays on its mesh; continue it there.")
    return jax.tree.map(np.asarray, tree)


def _held_so(cache: Cache, part: Partition | None) -> bool:
    for i, layer in enumerate(cache.layers):
        pools = parts(layer)
        shardings = [UNSHARDED] * len(pools) if part is None else [group.sharding for group in part.groups(i)]
        if [pool.sharding for pool in pools] != shardings:
            return False
    return True


def _resharded(cache: Cache, part: Partition | None) -> Cache:
    """The cache with its pages in the order in which these devices hold them, in the host's memory."""
    layers: list[Layer] = []
    # Arrays are laid out by the host's own device.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for i, layer in enumerate(cache.layers):
            pools = [unshard(_on_host(pool)) for pool in parts(layer)]
            if part is not None:
                shardings = [group.sharding for group in part.groups(i)]
                resized = (
                    resize(pool, sharding.rounded(pool.pages)) for pool, sharding in zip(pools, shardings, strict=True)
                )
                pools = [shard(pool, sharding) for pool, sharding in zip(resized, shardings, strict=True)]
            layers.append(with_parts(layer, pools))
    return _on_host(cache.replace(layers=tuple(layers)))
