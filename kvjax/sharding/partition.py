"""The sharding of every layer's KV heads, and of their pages, over the devices of a mesh's model axis.

A compiled program runs under one ``jax.shard_map``: each device runs the code of one device on its own rows,
its own heads and its own shard of the weights. So kernels, policies and loops are the same as on one device, every
collective is one that this package wrote, and nothing depends on what a partitioner would infer from the rest. What a
device sees is a smaller model (:class:`Partition.config_of`) and, where a policy splits a layer's heads in groups, a
policy that knows its groups by place (:class:`LocalHeads`).

Heads are sharded in equal blocks over as many devices as divide their number; over the devices that remain, each
head's pages are (``cache/page_sharding.py``). Heads that differ in more than what they hold are never sharded, only
their pages: ALiBi's, whose slopes are constants of the program, and buffers of a length for each head. The heads that
RazorAttention protects are a group, and the others another, so both are balanced whatever the layer protects.

Sharding pages does not divide prefill's attention: the devices that hold pages of a head each compute it for the entire
prompt, so that the policy finds on each of them all that it selects by. Decoding reads a device's own pages only.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.cache.cache import Cache
from kvjax.cache.groups import HeadGroups, Layer, parts, with_parts
from kvjax.cache.page_sharding import PageSharding
from kvjax.cache.pool import LayerCache, layout_for
from kvjax.cache.pool_sharding import local_shard
from kvjax.cache.quantisation import Storage
from kvjax.cache.shared_context import SharedContext
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy
from kvjax.policies.composed import FULL, HeadWise, Member, with_heads
from kvjax.policies.page_capacities import page_capacities
from kvjax.policies.window_layers import WithWindows
from kvjax.sharding.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class Group:
    """KV heads of a layer that are sharded together: ``heads`` in the order in which they are, and how."""

    heads: tuple[int, ...]
    sharding: PageSharding

    @property
    def count(self) -> int:
        """Heads that one device has."""
        return len(self.heads) // self.sharding.head_parts


@dataclasses.dataclass(frozen=True)
class LocalHeads(HeadWise):
    """A policy of head groups as a device runs it: groups are known by their place among the device's heads.

    Attributes:
      protected_first: [layer] how many of the device's heads, the first, keep everything.
      heads: [layer] how many it has.
      inner: the policy of the others.
    """

    layers_alike: ClassVar[bool] = True

    protected_first: tuple[int, ...]
    heads: tuple[int, ...]
    inner: Policy

    @property
    def named(self) -> Policy:
        return dataclasses.replace(self, inner=self.inner.named)

    @property
    def chosen_once(self) -> bool:
        return self.inner.chosen_once

    def heads_of(self, config: ModelConfig, layer: int) -> int:
        return self.heads[layer]

    def others(self, config: ModelConfig) -> Policy:
        return self.inner

    @property
    def unsized(self) -> Policy:
        return self.inner

    def members(self, config: ModelConfig, layer: int) -> list[Member]:
        kept, every = self.protected_first[layer], self.heads[layer]
        groups = [(FULL, tuple(range(kept))), (self.inner, tuple(range(kept, every)))]
        return [(policy, heads, with_heads(config, len(heads))) for policy, heads in groups if heads]


@dataclasses.dataclass(frozen=True)
class LocalWindows(WithWindows):
    """A policy beside rings as a device runs it that has other heads of a layer with a window than of a global one.

    Attributes:
      window_heads: the KV heads that it has of a layer with a window.
    """

    window_heads: int

    def part(self, config: ModelConfig, layer: int) -> tuple[Policy, int, ModelConfig]:
        policy, number, seen_as = super().part(config, layer)
        own = self.windows[layer] is None
        return policy, number, seen_as if own else with_heads(seen_as, self.window_heads)


@dataclasses.dataclass(frozen=True)
class Partition:
    """A model and a policy on a mesh; hashable, a static argument of the programs.

    Attributes:
      mesh: the devices. config: the unsharded model. policy: as the user gave it.
      first: the number of the layer that a cache begins with; a program of one layer has a cache of that one.
    """

    mesh: Mesh
    config: ModelConfig
    policy: Policy
    first: int = 0

    def at(self, layer: int) -> Partition:
        """The same devices, for a program of this layer alone."""
        return self if layer == self.first else dataclasses.replace(self, first=layer)

    def groups(self, layer: int) -> tuple[Group, ...]:
        """The groups of a layer's heads; one, unless the policy splits them."""
        return _groups(self.at(0))[layer]

    @property
    def grouped(self) -> bool:
        """Whether the policy splits heads in groups."""
        return isinstance(self.policy.chosen, HeadWise)

    @property
    def local_policy(self) -> Policy:
        """The policy that a device runs."""
        return _local_policy(self.at(0))

    def config_of(self, layer: int) -> ModelConfig:
        """The model as a device sees it in this layer: with the heads that it has there."""
        heads = sum(group.count for group in self.groups(layer))
        config = self.config.layer(layer)
        return config if heads == config.num_kv_heads else with_heads(config, heads)

    @property
    def local_config(self) -> ModelConfig:
        """The model as a device sees it, with as many heads as it has of any layer."""
        return max((self.config_of(i) for i in range(self.config.num_layers)), key=lambda c: c.num_kv_heads)

    @property
    def head_sharding(self) -> PageSharding:
        """How all of a layer's heads are divided, where they are alike."""
        return head_sharding(self.mesh, self.config)

    def over_rows(self, counts: Int[Array, " N"]) -> Int[Array, " N"]:
        """Counts of rows summed over the devices of the data axis; inside ``jax.shard_map`` only."""
        return jax.lax.psum(counts, "data")

    # --- caches -----------------------------------------------------------------------------------------------

    def pages(
        self, prompt_capacity: int, new_capacity: int, storage: Storage, own_capacity: int | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """[layer][head] pages that one device's part of an empty cache has; see ``policies/page_capacities.py``."""
        policy, page_size = self.local_policy, layout_for(storage, self.config.head_dim).page_size
        found = page_capacities(policy, self.local_config, prompt_capacity, new_capacity, page_size, own_capacity)
        every = []
        for i, counts in enumerate(found):
            start, wanted = 0, []
            for group in self.groups(i):
                # Where all layers share their slots, the group's heads are those of all of them.
                last = len(counts) if policy.shares_layers else start + group.count
                wanted += group.sharding.rounded(counts[start:last])
                start = last
            every.append(tuple(wanted))
        return tuple(every)

    def empty_layer(self, layer: int, batch: int, pages: tuple[int, ...], dtype: Any, storage: Storage) -> Layer:
        """One device's part of a layer of an empty cache, of as many :meth:`pages`."""
        whole = self.local_policy.init_layer(self.config_of(layer), layer, batch, pages, dtype, storage)
        pools = zip(parts(whole), self.groups(layer), strict=True)
        return with_parts(whole, [local_shard(pool, group.sharding) for pool, group in pools])

    def empty(
        self,
        batch: int,
        prompt_capacity: int,
        new_capacity: int,
        dtype: Any,
        storage: Storage,
        own_capacity: int | None = None,
    ) -> Cache:
        """One device's part of an empty cache, for ``batch`` rows of its own; see ``policies/empty_cache.py``."""
        pages = self.pages(prompt_capacity, new_capacity, storage, own_capacity)
        layers = tuple(self.empty_layer(i, batch, own, dtype, storage) for i, own in enumerate(pages))
        zeros, capacities = jnp.zeros((batch,), jnp.int32), (prompt_capacity, new_capacity)
        return Cache(layers, zeros, zeros, zeros - 1, self.local_policy, *capacities, None, own_capacity)

    def local(self, cache: Cache) -> Cache:
        """The cache with the static fields that a device sees; arrays as they are."""
        return self._relabelled(cache, self.local_policy, to_local=True)

    def all(self, cache: Cache) -> Cache:
        """Undo :meth:`local`."""
        return self._relabelled(cache, self.policy, to_local=False)

    def all_shared(self, context: SharedContext) -> SharedContext:
        """:meth:`all` of what rows share."""
        return self._relabelled_context(context, to_local=False)

    def _relabelled(self, cache: Cache, policy: Policy, to_local: bool) -> Cache:
        layers: list[Layer] = []
        for i, layer in enumerate(cache.layers, self.first):
            groups = self.groups(i)
            pools = [_paged(pool, group, to_local) for pool, group in zip(parts(layer), groups, strict=True)]
            if isinstance(layer, HeadGroups):
                heads = _places(groups) if to_local else tuple(group.heads for group in groups)
                layers.append(HeadGroups(tuple(pools), heads))
            else:
                layers.append(pools[0])
        context = cache.context and self._relabelled_context(cache.context, to_local)
        return cache.replace(layers=tuple(layers), policy=policy, context=context)

    def _relabelled_context(self, context: SharedContext, to_local: bool) -> SharedContext:
        layers = []
        for i, layer in enumerate(context.layers, self.first):
            pools = zip(layer, self.groups(i), strict=True)
            layers.append(tuple(pool and _paged(pool, group, to_local) for pool, group in pools))
        return dataclasses.replace(context, layers=tuple(layers))


def _paged(pool: LayerCache, group: Group, to_local: bool) -> LayerCache:
    """A pool with the pages of one device's heads, or of all devices'."""
    if group.sharding.head_parts == 1:
        return pool
    return pool.replace(pages=pool.pages[: group.count] if to_local else pool.pages * group.sharding.head_parts)


def _places(groups: tuple[Group, ...]) -> tuple[tuple[int, ...], ...]:
    """A device's heads of each group, by their place among all that it has."""
    found, start = [], 0
    for group in groups:
        found.append(tuple(range(start, start + group.count)))
        start += group.count
    return tuple(found)


def _sharding(mesh: Mesh, heads: int, alike: bool, by_row: bool = False) -> PageSharding:
    over = mesh.axes_dividing(heads) if alike and not by_row else ()
    rest = tuple(name for name in mesh.model_axes if name not in over)
    return PageSharding(over, rest, mesh.parts(over), mesh.parts(rest), by_row and mesh.parts(rest) > 1)


def head_sharding(mesh: Mesh, config: ModelConfig) -> PageSharding:
    """The sharding of all of a layer's heads, where they are alike, and of the weights' columns."""
    return _sharding(mesh, config.num_kv_heads, config.positional != "alibi")


@functools.lru_cache(maxsize=64)
def _groups(part: Partition) -> tuple[tuple[Group, ...], ...]:
    config, mesh, found = part.config, part.mesh, []
    rotary = config.positional != "alibi"
    for layer in range(config.num_layers):
        policy, number, seen_as = part.policy.part(config, layer)
        every = tuple(range(config.num_kv_heads))
        members = policy.members(seen_as, number) if isinstance(policy, HeadWise) else [(policy, every, seen_as)]
        sharded = [
            (heads, _sharding(mesh, len(heads), rotary and one.heads_alike, one.shares_slots))
            for one, heads, _ in members
        ]
        found.append(tuple(Group(*each) for each in sharded))
    return tuple(found)


@functools.lru_cache(maxsize=64)
def _local_policy(part: Partition) -> Policy:
    policy, config = part.policy, part.policy.seen_as(part.config)
    chosen = policy.chosen
    if isinstance(chosen, HeadWise) and not chosen.whole_layers:
        groups = [part.groups(layer) for layer in policy.chosen_layers(part.config)]
        protected = chosen.protected(config)
        kept = [own[0].count if first else 0 for own, first in zip(groups, protected, strict=True)]
        heads = tuple(sum(group.count for group in own) for own in groups)
        policy = policy.with_chosen(LocalHeads(tuple(kept), heads, chosen.others(config)))
    if not isinstance(policy, WithWindows):
        return policy
    # Rings are divided by heads, and pools of a layer whose heads share its slots, say, by pages.
    rings = [part.config_of(i).num_kv_heads for i, window in enumerate(policy.windows) if window is not None]
    if not rings or rings[0] == part.local_config.num_kv_heads:
        return policy
    return LocalWindows(policy.policy, policy.windows, rings[0])
