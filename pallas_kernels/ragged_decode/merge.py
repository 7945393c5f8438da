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
    out: Float[Array, "B I G D"],
    lse: Float[Array, "B I G"],
    begin: Int[np.ndarray, " H"] | Int[Array, "B H"],
    count: Int[np.ndarray, " H"] | Int[Array, "B H"],
    most: int,
) -> tuple[Float[Array, "B H G D"], Float[Array, "B H G"]]:
    """Merge the items of each head.

    Args:
      out: float32 results of the items; where ``lse`` is ``NEG`` any value, also NaN.
      lse: float32 log-sum-exp of each item's scores; ``NEG`` for one without a visible slot.
      begin: first item of each head. count: number of its items. Both static and the same for all rows, or by row.
      most: most items of a head.

    Returns:
      Results of the heads, zeros where no item has a visible slot, and their log-sum-exp, ``NEG`` there.
    """
    lse, out = _by_head(lse, begin, count, most), _by_head(out, begin, count, most)
    spare = np.arange(most, dtype=np.int32) >= count[..., None]
    if not isinstance(spare, np.ndarray) or spare.any():
        lse = jnp.where(spare[..., None], jnp.float32(NEG), lse)
    peak = lse.max(axis=2, keepdims=True)
    weight = jnp.where(lse > NEG, jnp.exp(lse - peak), jnp.float32(0))
    mass = weight.sum(axis=2)
    fraction = weight / jnp.maximum(mass, jnp.float32(1e-37))[:, :, None]
    whole = jnp.sum(jnp.where(fraction[..., None] > 0, out * fraction[..., None], jnp.float32(0)), axis=2)
    total = jnp.where(mass > 0, peak[:, :, 0] + jnp.log(jnp.maximum(mass, jnp.float32(1e-37))), jnp.float32(NEG))
    return whole, total


def _by_head(x: Array, begin: np.ndarray | Array, count: np.ndarray | Array, most: int) -> Array:
    """Items by head, [B, H, most, ...]: a view if all heads have equally many, else a gather that XLA fuses."""
    nth = np.arange(most, dtype=np.int32)
    if not isinstance(count, np.ndarray):
        index = begin[..., None] + jnp.minimum(nth, count[..., None] - 1)
        rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None, None]
        return x.at[rows, index].get(mode="promise_in_bounds")
    if (count == most).all():
        return x.reshape(x.shape[0], len(count), most, *x.shape[2:])
    index = begin[:, None] + np.minimum(nth, count[:, None] - 1)
    return x.at[:, index].get(mode="promise_in_bounds")
