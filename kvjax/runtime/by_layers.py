"""A long prompt read layer by layer, each in a program of its own: what else has to run may run in between.

The numbers are those of the whole prefill, which reads a prompt layer by layer too: a policy that selects by attention
over the entire prompt sees all of it, where pieces of the prompt would not do. Layers that are alike share one program.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.cache import NO_TOKEN, Cache
from kvjax.cache.groups import parts
from kvjax.cache.pool import layout_for
from kvjax.cache.quantisation import Storage
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.rope import angles_of_layers
from kvjax.policies.base import Policy
from kvjax.policies.page_capacities import page_capacities
from kvjax.runtime.alike import numbers_of_kind
from kvjax.runtime.layer_step import read_and_compress
from kvjax.runtime.prefill import last_logits
from kvjax.runtime.reading import Capacities, Reading
from kvjax.runtime.signal_collector import signal_collector

#: The most programs of layers that are worth compiling in place of one of all layers.
_MOST_KINDS = 4


def can_read_by_layers(policy: Policy, params: Decoder) -> bool:
    """Whether few programs suffice for all layers, and the policy reads prompts whole, once."""
    kinds = {number for number, _ in numbers_of_kind(policy, params)}
    whole = policy.signals.repeat is None and not policy.shares_layers
    return whole and policy.chunks(params.config) is None and len(kinds) <= _MOST_KINDS


def reading_by_layers(
    params: Decoder,
    tokens: Int[np.ndarray, "B T"],
    count: Int[np.ndarray, " B"],
    *,
    policy: Policy,
    size: Capacities,
    dtype: Any,
    storage: Storage,
) -> Reading:
    """Read prompts into a new cache on one device, a layer between two stops: as ``prefill_fresh``, with its result."""
    config = params.config
    page_size = layout_for(storage, config.head_dim).page_size
    pages = page_capacities(policy, config, size.prompt_capacity, size.new_capacity, page_size)
    work = np.where(tokens[:, 0] < 0, 0, count)
    ids, seen, working = jax.device_put((tokens, count, work))
    x, layers = _embedded(params, ids), []
    for layer, counts, (number, _) in zip(params.layers, pages, numbers_of_kind(policy, params), strict=True):
        given = layer, x, seen, working
        packed, x = _read_layer(policy, number, config, *given, pages=counts, dtype=jnp.dtype(dtype), storage=storage)
        layers.append(packed)
        yield
    capacities = size.prompt_capacity, size.new_capacity
    none = jnp.full_like(seen, NO_TOKEN)
    return Cache(tuple(layers), seen, seen, none, policy, *capacities), _logits(params, x, seen)


@jax.jit
def _embedded(params: Decoder, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
    return params.embed(jnp.maximum(tokens, 0))


@functools.partial(
    jax.jit, static_argnums=(0, 1, 2), static_argnames=("pages", "dtype", "storage"), donate_argnums=(4,)
)
def _read_layer(
    policy: Policy,
    index: int,
    config: ModelConfig,
    layer: DecoderLayer,
    x: Float[Array, "B T M"],
    count: Int[Array, " B"],
    work: Int[Array, " B"],
    *,
    pages: tuple[int, ...],
    dtype: Any,
    storage: Storage,
) -> tuple[Any, Float[Array, "B T M"]]:
    """One layer's cache, and what the next one reads."""
    seen = jnp.zeros_like(count)
    empty = policy.init_layer(config, index, len(count), pages, dtype, storage)
    (angles,) = angles_of_layers([layer.config], seen[:, None] + jnp.arange(x.shape[1]), count)
    collector = signal_collector(policy, config, seen, count, count, x.shape[1], True)
    given = layer, empty, x, angles, (seen, count, work, count), jnp.int32(0), collector, (None,) * len(parts(empty))
    packed, x, _, _ = read_and_compress(policy, index, *given, pages=pages, fresh=True)
    return packed, x


_logits = jax.jit(last_logits)
