"""Splits a cache into the context that rows read onto it will share, and what each of them has for itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.array_bytes import nbytes
from kvjax.cache.cache import Cache
from kvjax.cache.groups import pages_by_group, parts, rounded, with_parts
from kvjax.cache.packing import resize
from kvjax.cache.pool import LayerCache, pages_for
from kvjax.cache.quantisation import Storage
from kvjax.cache.shared_context import SharedContext, first_slots, slots_from
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy
from kvjax.policies.fixed import chooser_of
from kvjax.policies.page_capacities import page_capacities
from kvjax.sharding.compile import Device


def share(device: Device, cache: Cache, *, prompt_capacity: int) -> tuple[Cache, SharedContext]:
    """The slots of a cache that no later turn changes, and the cache without them.

    Args:
      cache: its policy shares contexts, and its storage is not quantised.
      prompt_capacity: a bucket of the tokens it has seen, from which the sizes of both follow; static.

    Returns:
      The rows' own part, with no room but for what it holds, and the shared one with a batch of as many rows.
    """
    config, policy = device.local_config, cache.policy
    whole = page_capacities(policy, config, prompt_capacity, 0, cache.page_size)
    beyond = page_capacities(policy, config, prompt_capacity, 0, cache.page_size, 0)
    layers, shared = [], []
    for i, layer in enumerate(cache.layers):
        own, held = [], []
        sizes = (pages_by_group(layer, rounded(layer, pages[i])) for pages in (whole, beyond))
        owners = policy.pool_policies(config, i)
        for pool, (owner, seen_as), all_pages, own_pages in zip(parts(layer), owners, *sizes, strict=True):
            if not owner.shares_context:
                own.append(pool)
                held.append(None)
                continue
            count = owner.shared_slots(i, pool, seen_as)
            held.append(first_slots(pool, count, tuple(min(pair) for pair in zip(all_pages, pool.pages, strict=True))))
            rest = slots_from(pool, count, own_pages)
            own.append(rest.replace(state=owner.beyond_shared(pool.state, count)))
        layers.append(with_parts(layer, own))
        shared.append(tuple(held))
    rest = cache.replace(layers=tuple(layers), prompt_capacity=prompt_capacity, new_capacity=0, own_capacity=0)
    return rest, SharedContext(tuple(shared), cache.seen)


def share_chosen(device: Device, cache: Cache, *, prompt_capacity: int, dtype: Any) -> tuple[Cache, SharedContext]:
    """A cache as the context of the rows that will be read onto it, and a row of it that holds nothing else.

    Args:
      device: of the policy that keeps what the cache's own has chosen; see :mod:`kvjax.policies.fixed`.
      cache: what was read. prompt_capacity: a bucket of its tokens, from which the sizes follow; static.
      dtype: of the model; static.
    """
    config, policy = device.local_config, device.local_policy
    whole = page_capacities(chooser_of(policy), config, prompt_capacity, 0, cache.page_size)
    row = device.empty(cache.batch, prompt_capacity, 0, dtype, cache.storage, own_capacity=0)
    counters = {"seen": cache.seen, "prompt_end": cache.prompt_end, "next_token": cache.next_token}
    if chooser_of(policy).shares_layers:
        (pool,) = cache.layers
        pages = tuple(min(pair) for pair in zip(rounded(pool, whole[0]), pool.pages, strict=True))
        pool = resize(pool, pages)
        return row.replace(**counters), SharedContext(((pool,),), cache.seen, prompt_capacity)
    layers, shared = [], []
    for i, (layer, own) in enumerate(zip(cache.layers, row.layers, strict=True)):
        if not policy.part(config, i)[0].chosen_once:  # a ring of a window, of which every row has its own
            layers.append(layer)
            shared.append((None,))
            continue
        pages = tuple(min(pair) for pair in zip(rounded(layer, whole[i]), layer.pages, strict=True))
        pools = zip(parts(layer), pages_by_group(layer, pages), strict=True)
        layers.append(own)
        shared.append(tuple(resize(pool, counts) for pool, counts in pools))
    return row.replace(layers=tuple(layers), **counters), SharedContext(tuple(shared), cache.seen)


def share_chosen_types(
    device: Device, cache: Cache, *, prompt_capacity: int, dtype: Any
) -> tuple[Cache, SharedContext]:
    """A tree like what :func:`share_chosen` gives, of a cache of all devices: of the same types, not sizes."""
    policy, config = device.policy, device.config
    row = jax.eval_shape(lambda: device.empty(1, prompt_capacity, 0, dtype, cache.storage, own_capacity=0))
    if chooser_of(policy).shares_layers:
        return row, SharedContext((cache.layers,), cache.seen, prompt_capacity)
    once = [policy.part(config, i)[0].chosen_once for i in range(len(cache.layers))]
    layers = [own if yes else layer for own, layer, yes in zip(row.layers, cache.layers, once, strict=True)]
    shared = tuple(tuple(parts(layer)) if yes else (None,) for layer, yes in zip(cache.layers, once, strict=True))
    return row.replace(layers=tuple(layers)), SharedContext(shared, cache.seen)


def share_types(cache: Cache, policy: Policy, config: ModelConfig) -> tuple[Cache, SharedContext]:
    """A tree like what :func:`share` gives, of a cache of all devices: its types are right, its sizes the cache's."""

    def split(cache: Cache) -> tuple[Cache, SharedContext]:
        layers, shared = [], []
        for i, layer in enumerate(cache.layers):
            both = list(zip(parts(layer), policy.pool_policies(config, i), strict=True))
            some = [owner.shares_context for _, (owner, _) in both]
            own = [
                pool.replace(state=owner.beyond_shared(pool.state, pool.length)) if yes else pool
                for (pool, (owner, _)), yes in zip(both, some, strict=True)
            ]
            layers.append(with_parts(layer, own))
            shared.append(tuple(p.replace(state=None) if yes else None for (p, _), yes in zip(both, some, strict=True)))
        return cache.replace(layers=tuple(layers)), SharedContext(tuple(shared), cache.seen)

    return jax.eval_shape(split, cache)


def shared_bytes(
    device: Device,
    batch: int,
    context: int,
    prompt_capacity: int,
    own_capacity: int,
    new_capacity: int,
    dtype: Any,
    storage: Storage,
) -> tuple[int, int]:
    """Bytes on a device of the rows of a cache that share a context, and of what they share.

    Args:
      batch: rows on the device. context: tokens that it has room for; of those of the rows, as for any cache,
        ``own_capacity`` come after it.
    """
    policy, config = device.policy, device.config

    def allocated() -> tuple[Any, Any]:
        rows = device.empty(batch, prompt_capacity, new_capacity, dtype, storage, own_capacity=own_capacity)
        if policy.chosen_once:
            chosen = dataclasses.replace(device, policy=chooser_of(policy))
            layers = enumerate(chosen.empty(1, context, 0, dtype, storage).layers)
            held = [layer for i, layer in layers if policy.part(config, i)[0].chosen_once]
            return rows, (held, jnp.zeros((1,), jnp.int32))
        rows = share_types(rows, policy, config)[0]
        return rows, share_types(device.empty(1, context, 0, dtype, storage), policy, config)[1]

    trees = jax.eval_shape(allocated)
    own, shared = map(nbytes, trees)
    return own, shared


#: Copies of a layer's contiguous rows that XLA holds at once while a prompt is read onto them, by its memory analysis
#: for CPUs: where all heads have equal runs of floats, and where runs are gathered or made floats first.
_COPIES, _GATHERED_COPIES = 2, 4


def copied_bytes(device: Device, context: int, dtype: Any, storage: Storage) -> int:
    """Temporary bytes on a device of the contiguous rows of a shared context that a prompt attends to, layer by layer.

    A head that shares a pool with others may hold nearly all of it, so every head's copy is as long as that.

    Args:
      context: tokens that the context has room for.
    """
    policy, config = device.policy, device.local_config
    reading = dataclasses.replace(device, policy=chooser_of(policy)) if policy.chosen_once else device
    layers = [parts(layer) for layer in jax.eval_shape(lambda: reading.empty(1, context, 0, dtype, storage)).layers]

    def of_layer(pools: tuple[LayerCache, ...]) -> int:
        heads = sum(len(pool.pages) for pool in pools) // pools[0].model_layers
        longest = max(max(pool.most_slots) for pool in pools)
        if pools[0].model_layers > 1:  # one pool of all layers, of which a head holds no more than the context
            longest = min(longest, pages_for(context, pools[0].page_size) * pools[0].page_size)
        equal = all(pool.row_starts is None and pool.scales is None for pool in pools)
        copies = _COPIES if equal else _GATHERED_COPIES
        return copies * heads * longest * 2 * config.head_dim * jnp.dtype(pools[0].dtype).itemsize

    quantised = sum(nbytes(pools) for pools in layers) if any(pool.scales for pools in layers for pool in pools) else 0
    return quantised + max(map(of_layer, layers))
