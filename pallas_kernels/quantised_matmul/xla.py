"""XLA form: runs everywhere. Weights become floats a block of outputs at a time, so that a matrix never is as a whole.

A loop over blocks is what keeps it so: XLA would compute all floats of a weight beforehand, and move that out of a
decode step's loop, gigabytes for a model.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised_matmul import weight_tiles
from pallas_kernels.quantised_matmul.matmul_problem import Problem

#: Outputs whose weights are floats at the same time, at most.
BLOCK = 512


def quantised_matmul(p: Problem, *, config: None = None) -> Float[Array, "S N"]:
    """See :func:`pallas_kernels.quantised_matmul.quantised_matmul`; there is nothing to configure."""
    del config
    return products(p, p.x)


def products(p: Problem, x: Float[Array, "S K"]) -> Float[Array, "S N"]:
    """The product of other activations."""
    block, sums = _block(p.outputs), p.sums(x)

    def body(i: Int[Array, ""], found: Float[Array, "S N"]) -> Float[Array, "S N"]:
        def part(each: Array, axis: int, size: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(each, i * size, size, axis)

        values, scale = part(p.values, 1, block * p.bits // 8), part(p.scale, 1, block)
        whole = weight_tiles.unpacked(values).reshape(block, -1, p.group)
        whole = weight_tiles.fp4_numbers(whole) if p.fp4 else whole
        wide = weight_tiles.fp8_floats(whole, jnp.float32) if p.fp8 else whole.astype(jnp.float32)
        weight = (wide * weight_tiles.floats(scale).T[..., None]).reshape(block, -1)
        # The barrier: a conversion that is part of a product is computed anew for every row on a CPU.
        weight = jax.lax.optimization_barrier(weight.astype(x.dtype))
        own = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        if p.minimum is not None:
            minima = weight_tiles.minima(values, scale, part(p.minimum, 1, block))
            assert minima is not None
            own = own + jnp.matmul(sums, minima, precision=jax.lax.Precision.HIGHEST)
        return jax.lax.dynamic_update_slice_in_dim(found, own, i * block, axis=1)

    zeros = jnp.zeros((len(x), p.outputs), jnp.float32)
    return jax.lax.fori_loop(0, p.outputs // block, body, zeros)


def _block(outputs: int) -> int:
    """The largest even divisor of the outputs up to :data:`BLOCK`, or all of them where that is tiny."""
    even = [size for size in range(2, BLOCK + 1, 2) if outputs % size == 0]
    return even[-1] if even and even[-1] >= math.isqrt(outputs) else outputs
