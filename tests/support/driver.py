"""Runs a policy's pure functions on given keys and values, as the runtime would, and tells which tokens stayed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import toys
from support.dense import dense_signals

from kvjax.cache.attention import decode_attention
from kvjax.cache.pool import LayerCache, keys_and_values
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy, PromptChunk, Step
from kvjax.policies.page_capacities import page_capacities


def config_for(heads: int, dim: int, layers: int = 1, **changes: Any) -> ModelConfig:
    shape = {"num_heads": 2 * heads, "num_kv_heads": heads, "head_dim": dim, "num_layers": layers}
    return toys.tiny_config(**shape | changes)


@dataclasses.dataclass
class Driver:
    """One layer under a policy, rows of a batch of their own lengths.

    ``k`` and ``v`` passed are always [B, H, T, D]; every row of every head must be unique so that tokens are known.
    ``q`` [B, H, G, T, D], queries after rotary embedding, is for policies that read attention: a prompt's signals are
    computed densely from it, and a step's logits by decode attention. ``raw``, where query statistics are asked for,
    are the queries before rotary embedding (``q`` when not given).
    """

    policy: Policy
    config: ModelConfig
    batch: int
    prompt_capacity: int
    new_capacity: int
    layer: int = 0
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        self.pages = page_capacities(self.policy, self.config, self.prompt_capacity, self.new_capacity)[self.layer]
        self.cache: LayerCache = self.policy.init_layer(self.config, self.layer, self.batch, self.pages, self.dtype)
        self.seen = np.zeros(self.batch, np.int32)

    def read(
        self,
        k: np.ndarray,
        v: np.ndarray,
        count: Any,
        total: Any = None,
        q: np.ndarray | None = None,
        raw: np.ndarray | None = None,
    ) -> Driver:
        """Compress a prompt, a chunk, or a turn onto what is there."""
        count = np.broadcast_to(np.asarray(count, np.int32), (self.batch,))
        total = self.seen + count if total is None else np.broadcast_to(np.asarray(total, np.int32), (self.batch,))
        # Buckets, as the runtime has: few shapes to compile, and padding that must not matter.
        k, v = (_padded(x, 64, 1e3) for x in (k, v))
        fresh = not self.seen.any()
        if not fresh:
            self.cache = _sort_slots(self.policy, self.layer, self.cache, self.config)
        signals = None
        if q is not None:
            q, raw = _padded(q, 64, 10.0), _padded(q if raw is None else raw, 64, 1e3)
            asked = self.policy, self.config, self.cache
            signals = dense_signals(*asked, q, raw, k, self.seen, count, total, fresh)
        chunk = PromptChunk(self.seen, count, total, pages=self.pages, config=self.config, fresh=fresh, signals=signals)
        self.cache = _compress(self.policy, self.layer, self.cache, k, v, chunk)
        self.seen = self.seen + count
        return self

    def decode(
        self, k: np.ndarray, v: np.ndarray, active: np.ndarray | None = None, q: np.ndarray | None = None
    ) -> Driver:
        """Append tokens one by one; ``active`` [T, B] says which rows take each."""
        steps = k.shape[2]
        if active is None:
            active = np.ones((steps, self.batch), bool)
        k, v = (_padded(x, 32, 0.0) for x in (k, v))
        q = None if q is None else _padded(q, 32, 0.0)
        active = np.pad(active, ((0, -steps % 32), (0, 0)))
        self.cache, seen = _decode(self.policy, self.layer, self.cache, k, v, q, self.seen, active, self.config)
        self.seen = np.asarray(seen)
        return self

    def kept(self, k: np.ndarray, row: int = 0) -> list[list[int]]:
        """Token numbers in the slots of each head, in slot order; the rows must be bitwise those of ``k``."""
        stored, _ = keys_and_values(self.cache)
        result = []
        for head in range(stored.shape[1]):
            length = int(self.cache.length[row, head])
            table = {k[row, head, t].astype(self.dtype).tobytes(): t for t in range(k.shape[2])}
            slots = np.asarray(stored[row, head, :length])
            result.append([table[slot.tobytes()] for slot in slots])
        return result


def _padded(x: np.ndarray, bucket: int, value: float) -> np.ndarray:
    """Tokens, the second axis from the end, up to a multiple of ``bucket``."""
    padding = ((0, 0),) * (x.ndim - 2) + ((0, -x.shape[-2] % bucket), (0, 0))
    return np.pad(x, padding, constant_values=value)


@functools.partial(jax.jit, static_argnames=("policy", "layer", "config"))
def _sort_slots(policy, layer, cache, config):
    return policy.sort_slots(layer, cache, config)


@functools.partial(jax.jit, static_argnames=("policy", "layer"))
def _compress(policy, layer, cache, k, v, chunk):
    return policy.compress(layer, cache, k, v, chunk)


@functools.partial(jax.jit, static_argnames=("policy", "layer", "config"))
def _decode(policy, layer, cache, k, v, q, seen, active, config):
    def step(carry, token):
        cache, seen = carry
        kt, vt, qt, on = token
        cache = _maintain(policy, layer, cache, seen, config)
        now = Step(seen, on, config=config)
        cache = policy.append(layer, cache, kt, vt, now)
        if qt is not None:
            scale = config.head_dim**-0.5
            _, logits = decode_attention(qt, cache, scale=scale, with_logits=policy.signals.decode_logits)
            cache = policy.observe(layer, cache, logits, now)
        return (cache, seen + on), None

    in_steps = None if q is None else q.transpose(3, 0, 1, 2, 4)
    tokens = (k.transpose(2, 0, 1, 3), v.transpose(2, 0, 1, 3), in_steps, active)
    (cache, seen), _ = jax.lax.scan(step, (cache, seen), tokens)
    return _maintain(policy, layer, cache, seen, config), seen


def _maintain(policy, layer, cache, seen, config):
    if not policy.maintains:
        return cache

    def row(cache):
        due = jnp.argmax(policy.due((cache,), config))
        return policy.maintain(layer, cache, config, due, seen[due])

    return jax.lax.while_loop(lambda cache: policy.due((cache,), config).any(), row, cache)


def random_kv(seed: int, batch: int, heads: int, tokens: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Random keys and values whose channels differ in scale and offset."""
    rng = np.random.default_rng(seed)
    shape = (batch, heads, tokens, dim)
    k, v = (rng.standard_normal(shape) * rng.uniform(0.5, 2, dim) + rng.standard_normal(dim) for _ in range(2))
    return k.astype(np.float32), v.astype(np.float32)
