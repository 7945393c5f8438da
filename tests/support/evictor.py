"""A layer of an evicting policy run on given queries, keys and values, and held against an oracle."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import toys
from support.eviction_oracle import NARROW, softmax

from kvjax.cache.attention import decode_attention
from kvjax.cache.pool import keys_and_values
from kvjax.cache.quantisation import MODEL, Storage
from kvjax.model.config import ModelConfig
from kvjax.policies.base import PromptChunk, Step
from kvjax.policies.page_capacities import page_capacities
from kvjax.policies.signals import Mass, PromptSignals

#: Tokens every prompt is padded to, and a layer's room: one size, so that few programs are compiled.
BUCKET, ROOM = 64, 128


def masses(
    q: np.ndarray,
    new: np.ndarray,
    kept: np.ndarray,
    length: np.ndarray,
    first: np.ndarray,
    count: np.ndarray,
    scale: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention mass of kept keys [B, H, G, C] and new ones [B, H, G, T] under each row's queries first .. count - 1.

    ``q`` [B, H, G, T, D], ``new`` [B, H, T, D], ``kept`` [B, H, C, D] of which ``length`` [B, H] are valid.
    """
    on_kept = np.zeros((*q.shape[:3], kept.shape[2]), np.float32)
    on_new = np.zeros(q.shape[:4], np.float32)
    for b, h in np.ndindex(*q.shape[:2]):
        held, queries = int(length[b, h]), np.arange(first[b], count[b])
        keys = np.concatenate([kept[b, h, :held], new[b, h, : count[b]]]).astype(np.float64)
        scores = float(scale[b]) * np.einsum("gqd,kd->gqk", q[b, h][:, queries].astype(np.float64), keys)
        visible = np.arange(len(keys)) <= held + queries[:, None]
        mass = softmax(np.where(visible, scores, -np.inf)).sum(axis=1)
        on_kept[b, h, :, :held], on_new[b, h, :, : count[b]] = mass[:, :held], mass[:, held:]
    return on_kept, on_new


@dataclasses.dataclass
class Evictor:
    """Runs one layer of an evicting policy on given queries, keys and values, as the runtime would.

    Every key of a head must be unique, so that tokens are known by their bytes.
    """

    policy: Any
    config: ModelConfig
    batch: int
    prompt_capacity: int
    new_capacity: int = 32
    storage: Storage = MODEL

    def __post_init__(self) -> None:
        self.pages = page_capacities(self.policy, self.config, self.prompt_capacity, self.new_capacity)[0]
        self.cache = self.policy.init_layer(self.config, 0, self.batch, self.pages, jnp.float32, self.storage)
        self.seen = np.zeros(self.batch, np.int32)

    def turn(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, count: Any) -> Evictor:
        """Read ``count`` tokens a row, a prompt or a later turn; ``q`` [B, H, G, T, D], ``k``, ``v`` [B, H, T, D]."""
        count = np.broadcast_to(np.asarray(count, np.int32), (self.batch,))
        fill = ((0, 0), (0, 0), (0, -k.shape[2] % BUCKET), (0, 0))
        k, v = np.pad(k, fill, constant_values=1e3), np.pad(v, fill, constant_values=1e3)
        q = np.pad(q, (*fill[:2], (0, 0), *fill[2:]))
        fresh, total = not self.seen.any(), self.seen + count
        if not fresh:
            self.cache = _sort_slots(self.policy, self.cache, self.config)
        signals = self._signals(q, k, count, total, fresh)
        chunk = PromptChunk(self.seen, count, total, self.pages, self.config, fresh, signals)
        self.cache = _compress(self.policy, self.cache, k, v, chunk)
        self.seen = total
        return self

    def _signals(self, q, k, count, total, fresh) -> PromptSignals:
        declared = self.policy.signals
        scaled = np.asarray(self.policy.window_scale(self.config, jnp.asarray(total)))
        plain = np.full(self.batch, self.config.head_dim**-0.5)
        kept, length = np.asarray(keys_and_values(self.cache)[0], np.float32), np.asarray(self.cache.length)

        def mass(first, scale):
            on_kept, on_new = masses(q, k, kept, length, first, count, scale)
            return Mass(None if fresh else jnp.asarray(on_kept), jnp.asarray(on_new))

        return PromptSignals(
            window=mass(np.maximum(count - declared.window, 0), scaled) if declared.window else None,
            columns=mass(0 * count, scaled if declared.columns_scaled else plain) if declared.columns else None,
        )

    def steps(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, active: np.ndarray | None = None) -> Evictor:
        """Decode tokens one by one; ``active`` [T, B] says which rows take each."""
        tokens = k.shape[2]
        active = np.ones((tokens, self.batch), bool) if active is None else active
        fill = -tokens % 32
        k, v = (np.pad(x, ((0, 0), (0, 0), (0, fill), (0, 0))) for x in (k, v))
        q = np.pad(q, ((0, 0), (0, 0), (0, 0), (0, fill), (0, 0)))
        active = np.pad(active, ((0, fill), (0, 0)))
        self.cache, seen = _decode(self.policy, self.cache, q, k, v, self.seen, active, self.config)
        self.seen = np.asarray(seen)
        return self

    def kept(self, k: np.ndarray, row: int = 0) -> list[list[int]]:
        """Numbers of the tokens each head still attends to, sorted; the stored keys must be those of ``k``, bitwise."""
        stored = np.asarray(keys_and_values(self.cache)[0])
        result = []
        for head in range(stored.shape[1]):
            length, following = int(self.cache.length[row, head]), int(self.cache.next[row, head])
            table = {k[row, head, t].tobytes(): t for t in range(k.shape[2])}
            slots = [s for s in range(length) if s != following]
            result.append(sorted(table[stored[row, head, s].tobytes()] for s in slots))
            assert len(result[-1]) == int(self.policy.retained(self.cache)[row, head])
        return result


@functools.partial(jax.jit, static_argnames=("policy", "config"))
def _sort_slots(policy, cache, config):
    return policy.sort_slots(0, cache, config)


@functools.partial(jax.jit, static_argnames=("policy",))
def _compress(policy, cache, k, v, chunk):
    return policy.compress(0, cache, k, v, chunk)


@functools.partial(jax.jit, static_argnames=("policy", "config"))
def _decode(policy, cache, q, k, v, seen, active, config):
    def step(carry, token):
        cache, seen = carry
        qt, kt, vt, on = token
        step = Step(seen, on, config=config)
        cache = policy.append(0, cache, kt, vt, step)
        _, logits = decode_attention(qt, cache, scale=config.head_dim**-0.5, with_logits=True)
        return (policy.observe(0, cache, logits, step), seen + on), None

    tokens = (q.transpose(3, 0, 1, 2, 4), k.transpose(2, 0, 1, 3), v.transpose(2, 0, 1, 3), active)
    (cache, seen), _ = jax.lax.scan(step, (cache, seen), tokens)
    return cache, seen


def layer_config(heads: int, group: int, dim: int) -> ModelConfig:
    """A model of one layer with these KV heads, query heads to each, and channels."""
    return toys.tiny_config(num_heads=heads * group, num_kv_heads=heads, head_dim=dim, num_layers=1)


def random_qkv(seed: int, batch: int, heads: int, group: int, tokens: int, dim: int, spread: float = 1.0):
    """Random queries [B, H, G, T, D], keys and values [B, H, T, D]; ``spread`` scales the queries."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, heads, group, tokens, dim)) * spread
    k, v = (rng.standard_normal((batch, heads, tokens, dim)) * rng.uniform(0.5, 2, dim) for _ in range(2))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


#: What every row does after its prompt: ("turn", tokens) or ("steps", tokens).
Event = tuple[str, int]


def compare(
    policy: Any,
    oracle_for: Callable[[np.ndarray, np.ndarray, np.ndarray], Any],
    lengths: list[int],
    events: list[Event],
    *,
    seed: int,
    heads: int = 2,
    group: int = 2,
    dim: int = 6,
    spread: float = 2.0,
) -> float:
    """Prompts of ``lengths`` tokens, then the events; asserts that product and oracle hold the same tokens throughout.

    ``oracle_for(q, k, v)`` makes a row's oracle of that row's own tokens. Rows whose oracle has chosen narrowly are not
    compared any further; returns the narrowest margin, so that a test can demand that all were.
    """
    batch, room = len(lengths), max(lengths)
    tokens = room + sum(count for _, count in events)
    q, k, v = random_qkv(seed, batch, heads, group, tokens, dim, spread)
    config = layer_config(heads, group, dim)
    evictor = Evictor(policy, config, batch, ROOM)
    own = [[*range(length), *range(room, tokens)] for length in lengths]
    oracles = [oracle_for(q[row][:, :, own[row]], k[row][:, own[row]], v[row][:, own[row]]) for row in range(batch)]
    at = 0
    for number, (kind, count) in enumerate([("turn", room), *events]):
        part, at = slice(at, at + count), at + count
        if kind == "turn":
            evictor.turn(q[..., part, :], k[..., part, :], v[..., part, :], count if number else lengths)
        else:
            evictor.steps(q[..., part, :], k[..., part, :], v[..., part, :])
        for row, oracle in enumerate(oracles):
            if kind == "turn":
                oracle.turn(count if number else lengths[row])
            for _ in range(count if kind == "steps" else 0):
                oracle.step()
            if oracle.margin > NARROW:
                expected = [[own[row][t] for t in held] for held in oracle.held]
                assert evictor.kept(k, row) == expected, (kind, number, row)
    return min(oracle.margin for oracle in oracles)
