"""A layer whose KV heads are split into groups, each with a pool and a state of its own.

Composition rests on this: a group is a :class:`LayerCache` of fewer heads, so any token policy runs on it as it would
on a smaller model, and heads of very different length do not share a pool.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.cache.host_memory import as_numpy
from kvjax.cache.pool import LayerCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadGroups:
    """One layer's heads in groups; every head belongs to exactly one.

    Attributes:
      groups: a pool each.
      heads: the layer's KV heads of each group, in the order the group's pool has them; static.
    """

    groups: tuple[LayerCache, ...]
    heads: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        if sorted(head for heads in self.heads for head in heads) != list(range(sum(map(len, self.heads)))):
            raise ValueError(f"groups of heads {self.heads} do not hold every head once")

    @property
    def order(self) -> tuple[int, ...]:
        """Where each head of the layer is in the groups' concatenation."""
        return tuple(int(i) for i in np.argsort(np.concatenate([np.asarray(heads) for heads in self.heads])))

    def join(self, parts: list[Any]) -> Any:
        """[B, heads of a group, ...] of every group, as [B, H, ...]; NumPy in, NumPy out."""
        xp = np if all(isinstance(part, np.ndarray) for part in parts) else jnp
        return xp.concatenate(parts, axis=1)[:, np.asarray(self.order)]

    def split(self, x: Array) -> list[Array]:
        """[B, H, ...] for every group."""
        return [x[:, np.asarray(heads)] for heads in self.heads]

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each head of the layer."""
        flat = [count for group in self.groups for count in group.pages]
        return tuple(flat[i] for i in self.order)

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of each head of the layer."""
        flat = [count for group in self.groups for count in group.slots]
        return tuple(flat[i] for i in self.order)

    @property
    def most_slots(self) -> tuple[int, ...]:
        """Slots that each head of the layer has at most, in any row."""
        flat = [count for group in self.groups for count in group.most_slots]
        return tuple(flat[i] for i in self.order)

    @property
    def length(self) -> Any:
        """[B, H] valid slots of each head of the layer."""
        return self.join([group.length for group in self.groups])

    @property
    def dtype(self) -> Any:
        return self.groups[0].dtype

    @property
    def model_layers(self) -> int:
        """One: layers that share their slots are not in groups."""
        return 1

    def replace_groups(self, groups: list[LayerCache] | tuple[LayerCache, ...]) -> HeadGroups:
        return dataclasses.replace(self, groups=tuple(groups))


#: A layer's cache.
Layer = LayerCache | HeadGroups


def parts(layer: Layer) -> tuple[LayerCache, ...]:
    """The pools of a layer."""
    return layer.groups if isinstance(layer, HeadGroups) else (layer,)


def counted_on_host(layer: Layer) -> Layer:
    """A layer whose counters are NumPy's, so that arithmetic with them compiles nothing."""
    pools = []
    for pool in parts(layer):
        mass = None if pool.log_mass is None else as_numpy(pool.log_mass)
        pools.append(pool.replace(length=as_numpy(pool.length), next=as_numpy(pool.next), log_mass=mass))
    return with_parts(layer, pools)


def with_parts(layer: Layer, pools: tuple[LayerCache, ...] | list[LayerCache]) -> Layer:
    """The layer with other pools in the places of :func:`parts`."""
    return layer.replace_groups(pools) if isinstance(layer, HeadGroups) else pools[0]


def slot_bytes(layer: Layer) -> tuple[int, ...]:
    """Bytes of one slot of each KV head of the layer."""
    flat = [pool.slot_nbytes for pool in parts(layer) for _ in pool.pages]
    return tuple(flat[i] for i in layer.order) if isinstance(layer, HeadGroups) else tuple(flat)


def split_heads(of_heads: tuple[int, ...], layers: int) -> list[tuple[int, ...]]:
    """Numbers of a pool's heads by layer of the model, whose heads follow those of the layer before."""
    heads = len(of_heads) // layers
    return [of_heads[i * heads : (i + 1) * heads] for i in range(layers)]


def pages_by_group(layer: Layer, pages: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Pages of the layer's heads, for each of :func:`parts`."""
    if not isinstance(layer, HeadGroups):
        return [pages]
    return [tuple(pages[head] for head in heads) for heads in layer.heads]


def rounded(layer: Layer, pages: tuple[int, ...]) -> tuple[int, ...]:
    """The pages of each head of the layer, rounded up to a multiple of the devices that shard them."""
    if not isinstance(layer, HeadGroups):
        return layer.sharding.rounded(pages)
    groups = zip(layer.groups, pages_by_group(layer, pages), strict=True)
    flat = [count for pool, counts in groups for count in pool.sharding.rounded(counts)]
    return tuple(flat[i] for i in layer.order)
