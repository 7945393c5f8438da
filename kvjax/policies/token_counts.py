"""Counts of tokens, solved by one formula on the host, in NumPy, and in compiled programs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.model.config import ModelConfig

#: Budgets are solved by one formula on the host, in NumPy, and in compiled programs.
HostOrTraced = np.ndarray | Array


def floor_fraction(ratio: float, total: HostOrTraced | int) -> Any:
    """``floor(ratio * total)``, in whole numbers: exactly as many on the host, which allocates, as when compiled.

    Float32 will not do: XLA fuses a product with the sum that forgives its last bit, and then the two differ. The
    ratio is rounded up to 40 bits, so that 0.3 of 10 tokens is 3; ``total`` is below 2 ** 21.
    """
    xp = numpy_or_jax(total)
    tokens = xp.asarray(total).astype(xp.int32)
    bits = math.ceil(float(ratio) * 2**40)
    below = 0  # long multiplication, ten bits at a time
    for shift in (0, 10, 20, 30):
        below = (tokens * (bits >> shift & 1023) + below) >> 10
    return tokens * (bits >> 40) + below


def per_head(count: HostOrTraced, config: ModelConfig) -> HostOrTraced:
    """[B] counts as [B, H]: the same for every KV head."""
    xp = numpy_or_jax(count)
    return xp.broadcast_to(count[:, None], (len(count), config.num_kv_heads)).astype(xp.int32)


def numpy_or_jax(x: Any) -> Any:
    """The array module of ``x``: ``numpy`` or ``jax.numpy``."""
    return jnp if isinstance(x, jax.Array) else np
