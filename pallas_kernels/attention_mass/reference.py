"""NumPy reference that computes every score at once; for tests."""

from __future__ import annotations

import numpy as np

from pallas_kernels.attention_mass.mass_problem import Counting, Problem
from pallas_kernels.softmax import NEG, NOTHING


def scores(p: Problem) -> tuple[np.ndarray, np.ndarray | None]:
    """[B, H, G, N, T] scores of the keys and [B, H, G, N, C] of the kept tokens, NEG where masked."""
    count, tokens = p.q.shape[3], p.k.shape[2]
    last = np.asarray(p.offset)[:, None] + np.arange(count)
    new = _products(p, p.k, np.arange(tokens)[None, None])
    key = np.arange(tokens)
    visible = key <= last[..., None]
    if p.window is not None:
        visible &= last[..., None] - key < p.window
    new = np.where(visible[:, None, None], new, NEG)
    if p.kept is None:
        return new, None
    kept, slot = _products(p, p.kept.k, p.kept.position), np.arange(p.kept.k.shape[2])
    if p.kept.log_mass is not None:
        kept = kept + np.where(slot == 0, np.asarray(p.kept.log_mass)[..., None], 0)[:, :, None, None]
    valid = slot < np.asarray(p.kept.length)[..., None]
    valid = np.broadcast_to(valid[:, :, None], (*valid.shape[:2], count, len(slot)))
    if p.window is not None:  # slot s holds the token that is length - s before the first key
        behind = np.asarray(p.kept.length)[..., None] - slot
        valid = valid & (last[:, None, :, None] + behind[:, :, None] < p.window)
    return new, np.where(valid[:, :, None], kept, NEG)


def _products(p: Problem, k, place) -> np.ndarray:
    _, heads, group, count, _ = p.q.shape
    wide = (np.asarray(x.astype("float32")).astype(np.float64) for x in (p.q, k))
    found = (
        np.einsum("bhgnd,bhtd->bhgnt", *wide, optimize=True)
        * np.asarray(p.scale, np.float64)[:, None, None, None, None]
    )
    if p.soft_cap is not None:
        found = p.soft_cap * np.tanh(found / p.soft_cap)
    if p.bias is not None and place is not None:
        found = found + np.asarray(p.bias(place)).reshape(-1, heads, group, count, found.shape[-1])
    return found


def log_sum_exp(p: Problem) -> np.ndarray:
    """See :func:`pallas_kernels.attention_mass.log_sum_exp`."""
    every = np.concatenate([x for x in scores(p) if x is not None], axis=-1)
    peak = every.max(axis=-1, keepdims=True)
    total = np.where(every > NOTHING, np.exp(every - peak), 0).sum(axis=-1)
    with np.errstate(divide="ignore"):
        return np.where(total > 0, peak[..., 0] + np.log(total), NEG).astype(np.float32)


def attention_mass(p: Problem, c: Counting) -> tuple[np.ndarray, np.ndarray | None]:
    """See :func:`pallas_kernels.attention_mass.attention_mass`."""
    weight = np.ones(()) if c.weight is None else np.asarray(c.weight)[:, None, None, :, None]
    lse = np.asarray(c.lse)[..., None]

    def summed(s: np.ndarray | None, onto) -> np.ndarray | None:
        if s is None:
            return None
        attention = np.where(s > NOTHING, np.exp(np.minimum(s - lse, 0)), 0)
        return (attention * weight).sum(axis=3) + (0 if onto is None else np.asarray(onto))

    new, kept = scores(p)
    onto = (None, None) if c.onto is None else c.onto
    found = summed(new, onto[0])
    assert found is not None
    return found, summed(kept, onto[1])
