"""Products with int8 weights by ``products.cc``, as functions of arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu import library

_COARSE, _FINE = library.FUNCTIONS["products"]


def available() -> bool:
    """Whether there is :func:`int8_product` on the platform compiled for; it is compiled here."""
    return library.loaded("products") is not None


def int8_product(
    x: Float[Array, "S K"],
    values: Int[Array, "N K"],
    scale: Float[Array, " N"],
    *,
    fine: bool = False,
    suffix: str = "",
) -> Float[Array, "S N"]:
    """``x @ (values * scale[:, None]).T``, float32, with each row of activations rounded to int8.

    Args:
      x: activations; their largest absolute value, over 127, is a row's step.
      values: int8. scale: float32.
      fine: whether activations are the sum of two int8 parts, the second of what the first leaves.
      suffix: of the functions' names, as they were registered.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], values.shape[0]), jnp.float32)
    call = jax.ffi.ffi_call((_FINE if fine else _COARSE) + suffix, out, vmap_method="sequential")
    return call(x.astype(jnp.float32), values, scale.astype(jnp.float32))
