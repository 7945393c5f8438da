"""Capacities in pages: what a policy's heads are allocated, as the layers of a cache have it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

from kvjax.cache.pool import PAGE_SIZE, pages_for
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy

T = TypeVar("T")


def page_capacities(
    policy: Policy, config: ModelConfig, prompt: int, new: int, page_size: int = PAGE_SIZE, own: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The policy's capacities in pages, by layer of the cache and head.

    With ``own``, of rows that share a context: what they do not.
    """
    slots = policy.capacities(config, prompt, new) if own is None else policy.own_capacities(config, prompt, own, new)
    wanted = [policy.heads_of(config, layer) for layer in range(config.num_layers)]
    if [len(heads) for heads in slots] != wanted:
        raise UsageError(
            f"{type(policy).__name__}.capacities must give {config.num_layers} layers of {config.num_kv_heads} heads; "
            f"it gave {[len(heads) for heads in slots]}."
        )
    # Runs of whole pages that begin where a row's choice says take a page a head more.
    shared = [[owner.shares_slots for owner in policy.owners(config, layer)] for layer in range(config.num_layers)]
    pages = tuple(
        tuple(pages_for(count, page_size) + more for count, more in zip(*both, strict=True))
        for both in zip(slots, shared, strict=True)
    )
    return by_pool(policy, pages)


def by_pool(policy: Policy, layers: Sequence[tuple[T, ...]]) -> tuple[tuple[T, ...], ...]:
    """The values of each head by layer of the cache: those of all heads together where one pool holds all layers."""
    return (tuple(itertools.chain(*layers)),) if policy.shares_layers else tuple(layers)
