"""Products of rows with float32 weights by ``float_products.cc``, as a function of arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.cpu import library

_PRODUCT, _PRODUCT_NT = library.FUNCTIONS["float_products"]


def available() -> bool:
    """Whether there is :func:`float_product` on the platform compiled for; it is compiled here."""
    return library.loaded("float_products") is not None


def float_product(
    x: Float[Array, "S K"], weight: Float[Array, "A B"], *, transposed: bool = False, suffix: str = ""
) -> Float[Array, "S N"]:
    """``x @ weight``, or ``x @ weight.T``, in float32; a row is the same beside any others, of up to 32 or of more.

    Args:
      x: float32 activations.
      weight: float32, [K, N], or [N, K] where ``transposed``.
      suffix: of the functions' names, as they were registered.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0 if transposed else 1]), jnp.float32)
    call = jax.ffi.ffi_call((_PRODUCT_NT if transposed else _PRODUCT) + suffix, out, vmap_method="sequential")
    return call(x, weight)
