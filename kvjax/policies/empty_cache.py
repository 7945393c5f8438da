"""Allocates the cache of a model under a policy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kvjax.cache.cache import Cache
from kvjax.cache.pool import layout_for
from kvjax.cache.quantisation import MODEL, Storage
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy
from kvjax.policies.page_capacities import page_capacities


def empty_cache(
    config: ModelConfig,
    policy: Policy,
    batch: int,
    prompt_capacity: int,
    new_capacity: int,
    dtype: Any,
    storage: Storage = MODEL,
    own_capacity: int | None = None,
) -> Cache:
    """An empty cache, allocated for prompts of ``prompt_capacity`` tokens and ``new_capacity`` decoded ones.

    With ``own_capacity``, for rows that share a context but for this many tokens of prompt.

    Raises:
      UsageError: the policy is one of rounds, which have no single cache.
    """
    if policy.offloads_rounds:
        raise UsageError(
            f"{type(policy).__name__} says where the rounds of a conversation are, and this takes a policy of tokens; "
            "use it with kvjax.generate or kvjax.Chat."
        )
    page_size = layout_for(storage, config.head_dim).page_size
    pages = page_capacities(policy, config, prompt_capacity, new_capacity, page_size, own_capacity)
    layers = tuple(policy.init_layer(config, layer, batch, own, dtype, storage) for layer, own in enumerate(pages))
    zeros = jnp.zeros((batch,), jnp.int32)
    return Cache(layers, zeros, zeros, zeros - 1, policy, prompt_capacity, new_capacity, own_capacity=own_capacity)
