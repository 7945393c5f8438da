"""Softmax over keys that are read in several parts, merged by their log-sum-exps."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

#: A finite stand-in for minus infinity: exp(NEG - m) is 0 for every reachable m, and NEG - NEG is 0, not NaN.
NEG = -0.7 * float(np.finfo(np.float32).max)

#: A score at or below this is masked: NEG plus any real score stays below it.
NOTHING = 0.5 * NEG

#: exp(x) = exp2(x LOG2E); accelerators have an instruction for exp2, and the factor is folded into the softmax's scale.
LOG2E = float(np.log2(np.e))


def capped(scores: Float[Array, "*S"], cap: float | None) -> Float[Array, "*S"]:
    """Scores bounded by ``cap tanh(score / cap)``, in their dtype; as they are without a cap."""
    if cap is None:
        return scores
    # A number of NumPy's would decide the dtype.
    number: Any = cap.item() if isinstance(cap, np.generic) else cap
    return number * jnp.tanh(scores * (1 / number))


def capped_log2(scores: Float[Array, "*S"], cap: float | None) -> Float[Array, "*S"]:
    """:func:`capped` of scores in units of log 2; the cap is in units of 1."""
    return scores if cap is None else capped(scores, cap * LOG2E)


def log_of(peak: Float[Array, "*S"], mass: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Log-sum-exp of a running softmax with largest score ``peak`` and ``mass``, the sum of exp(score - peak).

    NEG where the mass is 0.
    """
    return jnp.where(mass > 0, peak + jnp.log(jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)), NEG)


def merge_log(a: Float[Array, "*S"], b: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Log-sum-exp over the keys of both parts; a part may be empty (NEG)."""
    high = jnp.maximum(a, b)
    return high + jnp.log1p(jnp.exp(jnp.minimum(a, b) - high)) * (high > NOTHING)


def merge(
    out_a: Float[Array, "*S D"], lse_a: Float[Array, "*S"], out_b: Float[Array, "*S D"], lse_b: Float[Array, "*S"]
) -> tuple[Float[Array, "*S D"], Float[Array, "*S"]]:
    """Attention over the keys of both parts, in float32, with its log-sum-exp."""
    lse = merge_log(lse_a, lse_b)
    weight_a, weight_b = (jnp.exp(x - lse)[..., None] * (x > NOTHING)[..., None] for x in (lse_a, lse_b))
    return out_a.astype(jnp.float32) * weight_a + out_b.astype(jnp.float32) * weight_b, lse


def with_sink(
    out: Float[Array, "*S D"], lse: Float[Array, "*S"], sink: Float[Array, "*#S"]
) -> tuple[Float[Array, "*S D"], Float[Array, "*S"]]:
    """Attention, in its dtype, whose softmax has one more logit that brings no value, and its log-sum-exp."""
    merged = merge_log(lse, sink)
    return (out.astype(jnp.float32) * jnp.exp(lse - merged)[..., None]).astype(out.dtype), merged


def per_row(value: Any, batch: int, dtype: Any) -> Array:
    """Broadcast a number, a scalar array or one value per batch row to [B]."""
    return jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))
