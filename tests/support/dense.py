"""A prompt's signals from given queries, computed densely in NumPy and float64: what attention would hand over."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.cache.pool import LayerCache, keys_and_values
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy
from kvjax.policies.signals import Mass, PromptSignals, QueryStats


def dense_signals(
    policy: Policy,
    config: ModelConfig,
    cache: LayerCache,
    q: np.ndarray,
    raw: np.ndarray,
    k: np.ndarray,
    seen: np.ndarray,
    count: np.ndarray,
    total: np.ndarray,
    fresh: bool,
) -> PromptSignals:
    """The signals a policy declares.

    ``q`` [B, H, G, T, D] belong to the new keys ``k`` [B, H, T, D], of which each row has ``count`` after ``seen``;
    ``raw`` are the same queries before rotary embedding.
    """
    asked = policy.signals
    wanted = np.maximum(asked.window, np.ceil(asked.window_share * (seen + count) - 1e-3).astype(int))
    token = np.arange(q.shape[3])
    real = token < count[:, None]
    scaled = np.asarray(policy.window_scale(config, jnp.asarray(total)), np.float64)
    model = np.full(len(seen), config.head_dim**-0.5)
    window = columns = stats = None
    if asked.window or asked.window_share:
        counted = real & (token >= (count - wanted)[:, None])
        if asked.window_by_keys:
            counted = counted * (seen[:, None] + token + 1.0)
        window = _mass(cache, q, k, counted, scaled, fresh)
    if asked.columns:
        columns = _mass(cache, q, k, real, scaled if asked.columns_scaled else model, fresh)
    if asked.queries:
        stats = _stats(raw, real & (seen[:, None] + token >= asked.query_skip))
    noncausal = Mass(None, _noncausal(asked, q, k, seen, count)) if asked.noncausal else None
    # No model reads here, so nothing is repeated: any numbers between 0 and 1 will do, of each token and chunk others.
    repeat = None
    if asked.repeat is not None:
        channel = q[..., asked.repeat.chunk % q.shape[-1]].astype(np.float64)
        repeat = Mass(None, jnp.asarray(1 / (1 + np.exp(-channel)), jnp.float32))
    # No output projection either: norms that differ from token to token.
    outputs = Mass(None, jnp.asarray(np.abs(q[..., 1]) + 0.1, jnp.float32)) if asked.outputs else None
    # Nor hidden states: the first query head's queries stand for them.
    hidden = Mass(None, _linear(policy, config, q[:, :, 0])) if asked.hidden else None
    squares = None
    if asked.squares:
        last = (real & (token >= (count - asked.squares)[:, None]))[:, None, None, :, None]
        counted = np.maximum(last.sum(axis=3), 1)
        squares = jnp.asarray(((q.astype(np.float64) ** 2) * last).sum(axis=3) / counted, jnp.float32)
    return PromptSignals(window, columns, stats, noncausal, repeat, outputs, hidden, squares)


def _linear(policy: Policy, config: ModelConfig, q: np.ndarray) -> Any:
    """[B, H, 1, T] each head's linear function of its own numbers [B, H, T, D], as far as these go."""
    weights = policy.hidden_weights(config, config.num_layers - 1)
    found = np.einsum("bhtd,hd->bht", q.astype(np.float64), weights[:, : q.shape[-1]]) + weights[:, -1:]
    return jnp.asarray(found[:, :, None], jnp.float32)


def _noncausal(asked: Any, q: np.ndarray, k: np.ndarray, seen: np.ndarray, count: np.ndarray) -> Any:
    """Non-causal attention mass: of each chunk's queries to all of its keys, and of those that a short one lacks.

    1 for tokens of no chunk.
    """
    mass = np.ones((*q.shape[:4],))
    for row, (before, tokens) in enumerate(zip(seen, count, strict=True)):
        end = int(tokens) - asked.noncausal_last
        for start in range(max(asked.noncausal_first - int(before), 0), max(end, 0), asked.noncausal):
            part = slice(start, min(start + asked.noncausal, end))
            logits = np.einsum("hgqd,hkd->hgqk", q[row, :, :, part].astype(float), k[row, :, part].astype(float))
            if asked.noncausal_scaled:
                logits = logits * q.shape[-1] ** -0.5
            weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
            lacking = 1 - (part.stop - part.start) / asked.noncausal
            mass[row, :, :, part] = (weight / weight.sum(axis=-1, keepdims=True)).sum(axis=2) + lacking
    return jnp.asarray(mass, jnp.float32)


def _mass(cache: LayerCache, q: Any, k: Any, counted: np.ndarray, scale: np.ndarray, fresh: bool) -> Mass:
    """Attention of the ``counted`` [B, T] queries, times that, summed over them, to every kept slot and new key."""
    tokens = k.shape[2]
    logits = np.einsum("bhgtd,bhsd->bhgts", q.astype(np.float64), k.astype(np.float64))
    visible = np.broadcast_to(np.arange(tokens) <= np.arange(tokens)[:, None], logits.shape)
    logits, slots = logits * scale[:, None, None, None, None], 0
    if not fresh:
        old = np.asarray(keys_and_values(cache)[0], np.float64)
        slots = old.shape[2]
        before = np.einsum("bhgtd,bhsd->bhgts", q.astype(np.float64), old) * scale[:, None, None, None, None]
        if cache.log_mass is not None:
            before[..., 0] += np.asarray(cache.log_mass)[:, :, None, None]
        valid = np.arange(slots) < np.asarray(cache.length)[:, :, None]
        valid = np.broadcast_to(valid[:, :, None, None], before.shape)
        logits, visible = np.concatenate([before, logits], -1), np.concatenate([valid, visible], -1)
    logits = np.where(visible, logits, -np.inf)
    weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weight = weight / weight.sum(axis=-1, keepdims=True) * counted[:, None, None, :, None]
    mass = jnp.asarray(weight.sum(axis=3), jnp.float32)
    return Mass(None if fresh else mass[..., :slots], mass[..., slots:])


def _stats(raw: np.ndarray, counted: np.ndarray) -> QueryStats:
    batch, heads, group, _, dim = raw.shape
    mean, covariance = np.zeros((batch, heads, group, dim)), np.zeros((batch, heads, group, dim, dim))
    for at in np.ndindex(batch, heads, group):
        chosen = raw[at][counted[at[0]]].astype(np.float64)
        if len(chosen):
            mean[at] = chosen.mean(axis=0)
            covariance[at] = (chosen - mean[at]).T @ (chosen - mean[at]) / len(chosen)
    return QueryStats(*(jnp.asarray(x, jnp.float32) for x in (counted.sum(axis=1), mean, covariance)))
