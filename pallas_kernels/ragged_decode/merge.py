"""Merge of partial softmax results, each normalised over its own slots, by their log-sum-exps.

Two small fused XLA loops over the parts, without a scatter: segment sums would be atomic additions on a GPU, slow and
not deterministic.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.softmax import NEG


def merge(
    out: Float[Array, "B I G D"], lse: Float[Array, "B I G"], begin: Int[np.ndarray, " H"], count: Int[np.ndarray, " H"]
) -> tuple[Float[Array, "B H G D"], Float[Array, "B H G"]]:
    """Merge the items of each head.

    Args:
      out: float32 results of the items; where ``lse`` is ``NEG`` any value, also NaN.
      lse: float32 log-sum-exp of each item's scores; ``NEG`` for one without a visible slot.
      begin: first item of each head. count: number of its items. Both static.

    Returns:
      Results of the heads, zeros where no item has a visible slot, and their log-sum-exp, ``NEG`` there.
    """
    lse, out = _by_head(lse, begin, count), _by_head(out, begin, count)
    spare = np.arange(int(count.max())) >= count[:, None]
    if spare.any():
        lse = jnp.where(spare[:, :, None], jnp.float32(NEG), lse)
    peak = lse.max(axis=2, keepdims=True)
    weight = jnp.where(lse > NEG, jnp.exp(lse - peak), jnp.float32(0))
    mass = weight.sum(axis=2)
    fraction = weight / jnp.maximum(mass, jnp.float32(1e-37))[:, :, None]
    whole = jnp.sum(jnp.where(fraction[..., None] > 0, out * fraction[..., None], jnp.float32(0)), axis=2)
    total = jnp.where(mass > 0, peak[:, :, 0] + jnp.log(jnp.maximum(mass, jnp.float32(1e-37))), jnp.float32(NEG))
    return whole, total


def _by_head(x: Array, begin: np.ndarray, count: np.ndarray) -> Array:
    """Items by head, [B, H, longest, ...]: a view if all heads have equally many, else a gather that XLA fuses."""
    longest = int(count.max())
    if (count == longest).all():
        return x.reshape(x.shape[0], len(count), longest, *x.shape[2:])
    index = begin[:, None] + np.minimum(np.arange(longest), count[:, None] - 1)
    return x.at[:, index].get(mode="promise_in_bounds")
