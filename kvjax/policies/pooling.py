"""Scores of neighbours brought together: pooling along a row's own tokens, and the heads of a group."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.checks import MOST_KERNEL, whole_number
from kvjax.errors import UsageError, quoted
from kvjax.policies.base import Candidates
from kvjax.policies.option_checks import one_of

Pooling = Literal["avg", "max"]
Group = Literal["mean", "sum", "max"]


def check_pooling(kernel: int, pooling: str) -> None:
    """Refuse a kernel that has no middle, or an unknown kind of pooling."""
    whole_number("kernel", kernel, 1, MOST_KERNEL)
    if kernel % 2 == 0:
        raise UsageError(
            f"kernel is {quoted(kernel)}; give an odd number, so that pooling keeps every token in its place."
        )
    one_of("pooling", pooling, ("avg", "max"))


def pool(
    scores: Float[Array, "*S N"],
    length: Int[Array, "*#S"],
    kernel: int,
    pooling: Pooling = "avg",
) -> Float[Array, "*S N"]:
    """Average or maximum of each score and its ``kernel // 2`` neighbours on either side, stride 1, same length.

    Args:
      scores: along the last axis; entries at and beyond ``length`` are ignored, whatever they hold.
      length: where each run ends; its neighbours beyond either end do not exist.
      kernel: odd number of entries.
      pooling: "avg", which divides by the kernel at an end too as if there were zeros beyond it, as torch's
        ``avg_pool1d`` does, or "max".

    Returns:
      Pooled scores; 0 at and beyond ``length``.
    """
    inside = jnp.arange(scores.shape[-1]) < length[..., None]
    if pooling == "max":
        result = _windows(jnp.where(inside, scores, -jnp.inf), kernel, jax.lax.max, -jnp.inf)
        return jnp.where(inside, result, 0.0)
    total = _windows(jnp.where(inside, scores, 0.0), kernel, jax.lax.add, 0.0)
    return jnp.where(inside, total / kernel, 0.0)


def _windows(x: Float[Array, "*S N"], kernel: int, combine, start: float) -> Float[Array, "*S N"]:
    ones = (1,) * (x.ndim - 1)
    padding = ((0, 0),) * (x.ndim - 1) + ((kernel // 2, kernel // 2),)
    return jax.lax.reduce_window(x, jnp.asarray(start, x.dtype), combine, (*ones, kernel), (*ones, 1), padding)


def window_mass(candidates: Candidates) -> Float[Array, "B H G N"]:
    """Attention of the window's queries to each candidate, for a policy that declared it."""
    assert candidates.signals.window is not None
    return candidates.signals.window


def over_group(scores: Float[Array, "B H G N"], group: Group) -> Float[Array, "B H N"]:
    """One score a KV head from those of its query heads."""
    return {"mean": jnp.mean, "sum": jnp.sum, "max": jnp.max}[group](scores, axis=2)
