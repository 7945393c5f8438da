"""Runs a policy's pure functions on given keys and values, as the runtime would, and tells which tokens stayed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import toys

from kvjax.cache.pool import LayerCache, rows
from kvjax.config import ModelConfig
from kvjax.policies.base import Policy, Step, Turn, page_capacities


def config_for(heads: int, dim: int, layers: int = 1, **changes: Any) -> ModelConfig:
    return toys.tiny_config(num_heads=2 * heads, num_kv_heads=heads, head_dim=dim, num_layers=layers, **changes)


@dataclasses.dataclass
class Driver:
    """One layer under a policy, rows of a batch of their own lengths.

    ``k`` and ``v`` passed are always [B, H, T, D]; every row of every head must be unique so that tokens are known.
    """

    policy: Policy
    config: ModelConfig
    batch: int
    prompt_room: int
    new_room: int
    layer: int = 0
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        self.pages = page_capacities(self.policy, self.config, self.prompt_room, self.new_room)[self.layer]
        self.cache: LayerCache = self.policy.init_layer(self.config, self.layer, self.batch, self.pages, self.dtype)
        self.seen = np.zeros(self.batch, np.int32)

    def read(self, k: np.ndarray, v: np.ndarray, count: Any, total: Any = None) -> Driver:
        """Compress a prompt, a chunk, or a turn onto what is there."""
        count = np.broadcast_to(np.asarray(count, np.int32), (self.batch,))
        total = self.seen + count if total is None else np.broadcast_to(np.asarray(total, np.int32), (self.batch,))
        # Buckets, as the runtime has: few shapes to compile, and padding that must not matter.
        padding = ((0, 0), (0, 0), (0, -k.shape[2] % 64), (0, 0))
        k, v = np.pad(k, padding, constant_values=1e3), np.pad(v, padding, constant_values=1e3)
        fresh = not self.seen.any()
        self.cache = _compress(
            self.policy, self.layer, self.cache, k, v, self.seen, count, total, self.pages, self.config, fresh
        )
        self.seen = self.seen + count
        return self

    def decode(self, k: np.ndarray, v: np.ndarray, active: np.ndarray | None = None) -> Driver:
        """Append tokens one by one; ``active`` [T, B] says which rows take each."""
        steps = k.shape[2]
        if active is None:
            active = np.ones((steps, self.batch), bool)
        padding = -steps % 32
        k, v = (np.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (k, v))
        active = np.pad(active, ((0, padding), (0, 0)))
        self.cache, seen = _decode(self.policy, self.layer, self.cache, k, v, self.seen, active, self.config)
        self.seen = np.asarray(seen)
        return self

    def kept(self, k: np.ndarray, row: int = 0) -> list[list[int]]:
        """Token numbers in the slots of each head, in slot order; the rows must be bitwise those of ``k``."""
        stored, _ = rows(self.cache)
        result = []
        for head in range(stored.shape[1]):
            length = int(self.cache.length[row, head])
            table = {k[row, head, t].astype(self.dtype).tobytes(): t for t in range(k.shape[2])}
            slots = np.asarray(stored[row, head, :length])
            result.append([table[slot.tobytes()] for slot in slots])
        return result


@functools.partial(jax.jit, static_argnames=("policy", "layer", "pages", "config", "fresh"))
def _compress(policy, layer, cache, k, v, seen, count, total, pages, config, fresh):
    turn = Turn(seen, count, total, pages=pages, config=config, fresh=fresh)
    return policy.compress(layer, cache, k, v, turn)


@functools.partial(jax.jit, static_argnames=("policy", "layer", "config"))
def _decode(policy, layer, cache, k, v, seen, active, config):
    def step(carry, token):
        cache, seen = carry
        kt, vt, on = token
        cache = _maintain(policy, layer, cache, seen, config)
        cache = policy.append(layer, cache, kt, vt, Step(seen, on, config=config))
        return (cache, seen + on), None

    tokens = (k.transpose(2, 0, 1, 3), v.transpose(2, 0, 1, 3), active)
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
