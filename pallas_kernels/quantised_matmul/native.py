"""CPU form: ``pallas_kernels/cpu/group_products.cc``, which rounds activations as the form of integers does.

It reads numbers of 4 bits as they are; XLA writes them as numbers of 8 bits before it multiplies them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.cpu import library
from pallas_kernels.quantised_matmul.matmul_problem import Problem

(_FUNCTION,) = library.FUNCTIONS["group_products"]
_SCALES = jnp.float32, jnp.bfloat16, jnp.int16
#: Inputs of a group come in multiples of so many, and sums of more than so many would not fit int32.
LANES, MOST = 16, 1 << 16


def quantised_matmul(p: Problem, *, config: None = None, suffix: str = "") -> Float[Array, "S N"]:
    """See :func:`pallas_kernels.quantised_matmul.quantised_matmul`; ``suffix``: of the function's registered name."""
    del config
    if p.fp8:
        raise NotImplementedError("The CPU form multiplies whole numbers, not float8 ones.")
    if p.values.dtype not in (jnp.int8, jnp.uint8) or p.scale.dtype not in _SCALES:
        raise NotImplementedError(
            "The CPU form takes numbers of int8 or uint8, and scales of float32, bfloat16 or int16."
        )
    if p.group % LANES or p.group > MOST or not p.x.size or not p.outputs:
        raise NotImplementedError(
            f"The CPU form takes groups in multiples of {LANES} up to {MOST:,}, and a row and an output at least."
        )
    if not suffix and library.loaded("group_products") is None:
        raise NotImplementedError("There are no compiled products for this CPU.")
    out = jax.ShapeDtypeStruct((len(p.x), p.outputs), jnp.float32)
    call = jax.ffi.ffi_call(_FUNCTION + suffix, out, vmap_method="sequential")
    minimum = jnp.zeros((0, 0), p.scale.dtype) if p.minimum is None else p.minimum
    return call(p.x.astype(jnp.float32), p.values, p.scale, minimum, fp4=p.fp4)
