"""Bytes of weights, caches and prefill on each device, from the code that allocates them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.array_bytes import nbytes
from kvjax.cache.quantisation import MODEL, Storage
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import abstract_decoder
from kvjax.policies import Policy
from kvjax.policies.empty_cache import empty_cache
from kvjax.runtime.alike_layers import compiles_faster_by_layers
from kvjax.runtime.prefill_peak import prefill_peak_bytes
from kvjax.runtime.share_context import copied_bytes, shared_bytes
from kvjax.sharding.compile import device_of
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.partition import Partition
from kvjax.sharding.placement import device_weights_bytes, splits


def full_cache_bytes(config: ModelConfig, tokens: int, dtype: Any) -> int:
    """Keys and values of ``tokens`` tokens in every layer and head, nothing padded: what an exact full cache holds.

    Of a layer with a window, those of the tokens in it.
    """
    windows = [config.window_of(layer) for layer in range(config.num_layers)]
    held = sum(tokens if window is None else min(tokens, window) for window in windows)
    return 2 * held * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


@functools.lru_cache(maxsize=128)
def cache_bytes(
    config: ModelConfig,
    policy: Policy,
    batch: int,
    prompt_capacity: int,
    new_capacity: int,
    dtype: Any,
    storage: Storage = MODEL,
    mesh: Mesh | None = None,
) -> int:
    """Bytes of the buffers that would be allocated (on each device), from the same code that allocates them."""
    capacities = prompt_capacity, new_capacity, dtype, storage
    if mesh is None:
        shapes = jax.eval_shape(lambda: empty_cache(config, policy, batch, *capacities))
    else:
        rows = mesh.rows(batch) // mesh.data
        shapes = jax.eval_shape(lambda: Partition(mesh, config, policy).empty(rows, *capacities))
    return nbytes(shapes)


@functools.lru_cache(maxsize=128)
def shared_context_bytes(
    config: ModelConfig,
    policy: Policy,
    batch: int,
    context: int,
    prompt_capacity: int,
    own_capacity: int,
    new_capacity: int,
    dtype: Any,
    storage: Storage = MODEL,
    mesh: Mesh | None = None,
) -> tuple[int, int]:
    """:func:`cache_bytes` of rows that share a context but for ``own_capacity`` tokens, and of that context."""
    rows = batch if mesh is None else mesh.rows(batch) // mesh.data
    device = device_of(mesh, config, policy)
    return shared_bytes(device, rows, context, prompt_capacity, own_capacity, new_capacity, dtype, storage)


@functools.lru_cache(maxsize=128)
def shared_copy_bytes(
    config: ModelConfig, policy: Policy, context: int, dtype: Any, storage: Storage = MODEL, mesh: Mesh | None = None
) -> int:
    """Temporary bytes of prefill onto a shared context of ``context`` tokens for it alone, on each device."""
    return copied_bytes(device_of(mesh, config, policy), context, dtype, storage)


@functools.lru_cache(maxsize=32)
def weights_bytes(config: ModelConfig, dtype: Any, mesh: Mesh | None = None) -> int:
    """Bytes of the parameters, on each device."""
    abstract = abstract_decoder(config, dtype)
    return nbytes(abstract) if mesh is None else device_weights_bytes(abstract, mesh)


def prefill_bytes(
    config: ModelConfig,
    policy: Policy,
    batch: int,
    prompt: int,
    dtype: Any,
    mesh: Mesh | None,
    *,
    in_one: bool = False,
) -> int:
    """Temporary bytes of prefill, on each device; ``in_one`` program where it might be layer by layer."""
    inner = config.mlp_channels
    if mesh is None:
        by_layers = not in_one and compiles_faster_by_layers(policy, config)
        return prefill_peak_bytes(config, policy, batch, prompt, dtype, inner, by_layers=by_layers)
    inner = inner // mesh.model if splits(mesh, config).mlp else inner
    rows, own = mesh.rows(batch) // mesh.data, Partition(mesh, config, policy).local_config
    return prefill_peak_bytes(own, policy, rows, prompt, dtype, inner)
