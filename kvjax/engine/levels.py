"""Smaller pools while they suffice: XLA's decode attention reads what is allocated, and not what is held.

A quarter or a half of each head's slots are allocated while every row has room in them, and copied to the next size
when one has not. Kernels of accelerators, and of CPUs with a C++ compiler, follow the lengths: with them an engine has
its full size from the beginning, and one decode program. Policies that score every slot at each step read them all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from kvjax.allocation import Allocation
from kvjax.cache.cache import Cache, resize_layer
from kvjax.cache.pool import layout_for
from kvjax.cache.quantisation import Storage
from kvjax.halving import largest
from kvjax.model.config import ModelConfig
from kvjax.policies import Policy
from kvjax.policies.page_capacities import by_pool, page_capacities
from pallas_kernels import dispatch
from pallas_kernels.ragged_decode import native

#: Parts of an engine's slots that are tried, and the least tokens that one is made for.
_PARTS, _LEAST = (4, 2, 1), 64


@dataclasses.dataclass(frozen=True)
class Level:
    """One size of all slots.

    Attributes:
      allocation: what it is made for. pages: of the heads of each layer of the cache. slots: that surely hold tokens,
        [layer][head]. sharing: of each layer the heads that share theirs.
    """

    allocation: Allocation
    pages: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[int, ...], ...]
    sharing: tuple[tuple[int, ...], ...]

    def free(self, held: Sequence[Int[np.ndarray, " H"]]) -> int:
        """Tokens that a row has room for beside what it holds of each layer's heads; negative where these have none."""
        each = zip(self.slots, held, self.sharing, strict=True)
        return min(_free(np.asarray(slots) - own, sharing) for slots, own, sharing in each)


def _free(left: Int[np.ndarray, " H"], sharing: tuple[int, ...]) -> int:
    """Tokens that a layer has room for whose heads have ``left`` slots; those that share have equally many."""
    heads = list(sharing)
    if heads:
        left[heads] = left[heads].sum() // len(heads)
    return int(left.min())


@functools.lru_cache(maxsize=4096)
def free_after(config: ModelConfig, policy: Policy, level: Level, tokens: int) -> int:
    """Tokens that a row may decode in slots of this size after a first prompt of ``tokens``; -1 where that has no room.

    A policy may drop some of them again, so that they are more than the slots that are left.
    """

    def fit(new: int) -> bool:
        pairs = zip(by_pool(policy, policy.capacities(config, tokens, new)), level.slots, strict=True)
        return all(own <= there for heads, slots in pairs for own, there in zip(heads, slots, strict=True))

    most = 2 * (level.allocation.prompt_capacity + level.allocation.new_capacity)
    return largest(1, most + 1, lambda count: fit(count - 1)) - 1


def levels_of(
    config: ModelConfig, policy: Policy, own: Allocation, page_size: int, *, smaller: bool
) -> tuple[Level, ...]:
    """The sizes that an engine's slots may have, the smallest first, its own last and, but for ``smaller``, alone."""
    owners = by_pool(policy, [policy.owners(config, layer) for layer in range(config.num_layers)])
    grow = all(owner.grows for some in owners for owner in some)
    # Where all layers share their slots a step reads what a layer holds, and not what is allocated.
    parts = _PARTS if smaller and grow and not policy.shares_layers else (1,)
    sharing = tuple(tuple(h for h, owner in enumerate(some) if owner.shares_slots) for some in owners)
    found: list[Level] = []
    for part in parts:
        prompt = min(own.prompt_capacity, max(_LEAST, own.prompt_capacity // part))
        new = min(own.new_capacity, max(_LEAST, own.new_capacity // part))
        pages = page_capacities(policy, config, prompt, new, page_size, own.own_capacity)
        size = dataclasses.replace(own, prompt_capacity=prompt, new_capacity=new)
        if not found or pages != found[-1].pages:
            # Of heads that share, a part of a page stays empty in each.
            slots = tuple(
                tuple((count - (head in some)) * page_size for head, count in enumerate(heads))
                for heads, some in zip(pages, sharing, strict=True)
            )
            found.append(Level(size, pages, slots, sharing))
        else:
            found[-1] = dataclasses.replace(found[-1], allocation=size)
    return tuple(found)


def has_levels(config: ModelConfig, policy: Policy, dtype: Any, storage: Storage, *, on_mesh: bool) -> bool:
    """Whether an engine's slots may be smaller than it has planned."""
    if dispatch.platform() != "cpu" or on_mesh:
        return False
    layout, stored = layout_for(storage, config.head_dim), "int8" if storage.quantised else dtype
    pages = jax.eval_shape(lambda: layout.zeros(1, 1, config.head_dim, stored))
    return policy.signals.decode_logits or not native.follows_lengths(pages)


def resized(cache: Cache, level: Level) -> Cache:
    """The same rows in slots of another size: a copy."""
    size = level.allocation
    capacities = {"prompt_capacity": size.prompt_capacity, "new_capacity": size.new_capacity}
    return _with_pages(cache.replace(**capacities), level.pages)


@functools.partial(jax.jit, static_argnums=1)
def _with_pages(cache: Cache, pages: tuple[tuple[int, ...], ...]) -> Cache:
    layers = (resize_layer(layer, own) for layer, own in zip(cache.layers, pages, strict=True))
    return cache.replace(layers=tuple(layers))
