"""Caches and timings without prompts, for benchmarks: shapes and state as after real prompts, contents random."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.cache import Cache
from kvjax.cache.groups import parts
from kvjax.cache.quantisation import MODEL, Storage
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder
from kvjax.policies.base import Policy, PromptChunk
from kvjax.policies.empty_cache import empty_cache
from kvjax.policies.signals import Mass, PromptSignals, QueryStats
from kvjax.runtime.choice_of_all_layers import compress_together
from kvjax.runtime.decode import CHUNK, Controls, DecodeState
from kvjax.runtime.prefill_layer import zero_after
from kvjax.runtime.programs import ONE_DEVICE
from kvjax.runtime.sampling import Sampling
from kvjax.runtime.stopping import stop_table


@functools.partial(jax.jit, static_argnames=("config", "policy", "batch", "tokens", "new_capacity", "dtype", "storage"))
def _filled(
    config: ModelConfig, policy: Policy, batch: int, tokens: int, new_capacity: int, dtype: Any, storage: Storage
) -> Cache:
    cache = empty_cache(config, policy, batch, tokens, new_capacity, dtype, storage)
    count = jnp.full((batch,), tokens, jnp.int32)
    layers: list[Any] = []
    dense: list[Any] = []
    found: list[Any] = []
    pages = cache.layers[0].pages
    for i, layer in enumerate(cache.by_layer()):
        shape = (batch, config.num_kv_heads, tokens, config.head_dim)
        # A layer's rows are drawn once those before it are packed, so that no two layers' are alive at once.
        packed = [x for pool in parts(layers[-1]) for x in jax.tree.leaves(pool.kv)] if layers else []
        before = zero_after(*packed) if layers else 0
        keys = jax.random.split(jax.random.key(i + before), 2)
        k, v = (jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in keys)
        signals = random_signals(policy, config, batch, tokens, keys[0])
        if policy.shares_layers:
            dense.append((k, v))
            found.append(signals)
            continue
        chunk = PromptChunk(cache.seen, count, count, pages=layer.pages, config=config, fresh=True, signals=signals)
        layers.append(jax.lax.optimization_barrier(policy.compress(i, layer, k, v, chunk)))
    if policy.shares_layers:
        model = [config.layer(i) for i in range(config.num_layers)], range(config.num_layers)
        given = cache.layers[0], cache.by_layer(), dense, found, (cache.seen, count, count, count), pages
        layers = [compress_together(policy, *model, *given, fresh=True)]
    return cache.replace(layers=tuple(layers), seen=count, prompt_end=count, next_token=jnp.zeros_like(count))


def random_signals(policy: Policy, config: ModelConfig, batch: int, tokens: int, key: Any) -> PromptSignals | None:
    """Random numbers in the shapes of what the policy asks of a fresh prompt."""
    asked = policy.signals
    heads = (batch, config.num_kv_heads, config.group_size)
    window = Mass(None, jax.random.uniform(key, (*heads, tokens))) if asked.window or asked.window_share else None
    columns = Mass(None, jax.random.uniform(key, (*heads, tokens))) if asked.columns else None
    stats = None
    if asked.queries:
        mean = jax.random.normal(key, (*heads, config.head_dim))
        covariance = jnp.broadcast_to(jnp.eye(config.head_dim), (*mean.shape, config.head_dim))
        stats = QueryStats(jnp.full((batch,), tokens, jnp.float32), mean, covariance)
    noncausal = Mass(None, jax.random.uniform(key, (*heads, tokens))) if asked.noncausal else None
    repeat = Mass(None, jax.random.uniform(key, (*heads[:2], 1, tokens))) if asked.repeat else None
    outputs = Mass(None, jax.random.uniform(key, (*heads, tokens))) if asked.outputs else None
    squares = jax.random.uniform(key, (*heads, config.head_dim)) if asked.squares else None
    return PromptSignals(window, columns, stats, noncausal, repeat, outputs, squares=squares)


def filled_cache(
    config: ModelConfig,
    policy: Policy,
    batch: int,
    seen: int,
    dtype: Any = jnp.float32,
    new_capacity: int = 256,
    storage: Storage = MODEL,
) -> Cache:
    """A cache as after prompts of ``seen`` tokens with random keys and values, without running a prompt."""
    return _filled(config, policy, batch, seen, new_capacity, jnp.dtype(dtype), storage)


def benchmark_controls(config: ModelConfig, batch: int) -> Controls:
    """Greedy, and nothing ends a row."""
    sampling = Sampling.greedy(batch, config.vocab_size)
    most = np.int32(np.iinfo(np.int32).max)
    return Controls(
        sampling,
        stop_table((), (), (), config.vocab_size, batch),
        jnp.full((batch,), most),
        jnp.asarray(most),
        jnp.bool_(False),
        jnp.int32(1),
    )


def decode_state(config: ModelConfig, cache: Cache) -> DecodeState:
    """The loop's carry for a cache whose next tokens are set."""
    zeros = jnp.zeros((cache.batch,), jnp.int32)
    return DecodeState(
        cache=cache,
        reason=zeros,
        stop_state=zeros,
        present=jnp.zeros((cache.batch, config.vocab_size), bool),
        made=zeros,
        tokens=jnp.full((cache.batch, CHUNK), -1, jnp.int32),
        logprobs=jnp.zeros((cache.batch, CHUNK)),
        logits=jnp.zeros((cache.batch, config.vocab_size)),
        first=jnp.bool_(False),
    )


def run_steps(params: Decoder, state: DecodeState, controls: Controls, steps: int) -> tuple[DecodeState, float]:
    """Run ``steps`` (at most CHUNK) decode steps; the state given is consumed.

    Returns:
      ``(state, seconds a step)``.
    """
    start = time.perf_counter()
    state, _ = jax.block_until_ready(ONE_DEVICE.chunk(params, state, controls, steps))
    return state, (time.perf_counter() - start) / steps


def weight_bytes_per_step(params: Decoder) -> int:
    """Bytes of weights a decode step must read: all of them, but of an untied embedding table only a few rows."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return total if params.config.tie_embeddings else total - params.embedding[...].nbytes
