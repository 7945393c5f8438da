"""Keys of which only some channels are stored, chosen for each head of each row (``LayerCache.channels``).

A pool takes and gives keys of all D channels, so that whoever reads it, policies among them, never knows: a channel
that is not stored is 0. Only attention's queries are cut to the stored channels instead, since kernels read the pages
themselves; q.k over these is what q.k over all is with zeros. Choosing is a product with 0 and 1, which is exact, and
which a TPU does where it would gather lane by lane.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cut(x: Float[Array, "B H *N D"], channels: Int[Array, "B H K"] | None) -> Float[Array, "B H *N K"]:
    """The stored channels of keys or queries; all of them where there is no choice."""
    if channels is None:
        return x
    return _product("bhnd,bhkd->bhnk", x, channels, x.shape[-1])


def spread(k: Float[Array, "B H *N K"], channels: Int[Array, "B H K"] | None, dim: int) -> Float[Array, "B H *N D"]:
    """Keys of stored channels as keys of all: 0 in the others."""
    if channels is None:
        return k
    return _product("bhnk,bhkd->bhnd", k, channels, dim)


def _product(form: str, x: Array, channels: Int[Array, "B H K"], dim: int) -> Array:
    chosen = (channels[..., None] == jnp.arange(dim)).astype(x.dtype)
    flat = x.reshape(*x.shape[:2], -1, x.shape[-1])
    found = jnp.einsum(form, flat, chosen, precision=jax.lax.Precision.HIGHEST)
    return found.reshape(*x.shape[:-1], found.shape[-1])
