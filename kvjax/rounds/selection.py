"""Selects a question's rounds: qAtt of every round, and the strategies of section 3.3. NumPy, row by row."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

from kvjax.policies.base import floor_fraction
from kvjax.policies.round_attention import RoundAttention


def round_attention(
    mass: Float[np.ndarray, "H C"], start: Int[np.ndarray, "R H"], end: Int[np.ndarray, "R H"]
) -> Float[np.ndarray, " R"]:
    """qAtt [1]: attention of a question's tokens summed over each round's slots and over heads, normalised over rounds.

    Args:
      mass: of every slot at the watershed layer, over the question's tokens.
      start, end: the slots of each round in each head; what lies in no round (sinks, system prompt) does not count.
    """
    running = np.concatenate([np.zeros((len(mass), 1)), np.cumsum(mass, axis=1, dtype=np.float64)], axis=1)
    heads = np.arange(len(mass))
    total = np.maximum(running[heads, end] - running[heads, start], 0.0).sum(axis=1)
    return normalised(total)


def normalised(total: Float[np.ndarray, " R"]) -> Float[np.ndarray, " R"]:
    """Fractions of the whole; equal ones where there is no attention at all."""
    whole = total.sum()
    return total / whole if whole > 0 else np.full(len(total), 1.0 / max(len(total), 1))


def select(policy: RoundAttention, attention: Float[np.ndarray, " R"]) -> Bool[np.ndarray, " R"]:
    """The units (rounds, or tokens) that a strategy takes; at least one, and of equal ones the later."""
    count = len(attention)
    if count == 0:
        return np.zeros(0, bool)
    if policy.strategy == "topk":
        return highest(attention, max(int(floor_fraction(policy.top, np.asarray([count]))[0]), 1))
    limit = {
        "fixed": policy.threshold,
        "adaptive": attention.mean() + policy.std * attention.std(),
        "above_mean": attention.mean(),
    }[policy.strategy]
    chosen = attention > limit * (1 + 1e-9)  # rounds that differ by rounding alone are equal
    return chosen if chosen.any() else highest(attention, 1)


def highest(attention: Float[np.ndarray, " R"], count: int) -> Bool[np.ndarray, " R"]:
    """The ``count`` largest; of equal ones the later."""
    order = np.lexsort((np.arange(len(attention)), attention))
    chosen = np.zeros(len(attention), bool)
    chosen[order[len(order) - count :]] = True
    return chosen
