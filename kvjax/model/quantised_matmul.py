"""Products with quantised weights, in the form that each platform computes fastest.

CPUs and TPUs multiply int8 numbers by int8 numbers: each token's activations are rounded as rows of weights are
(:mod:`kvjax.model.quantised`), sums are exact in int32, and both scales multiply them. A token's result is the same
whatever other tokens are beside it. On a mesh each device rounds the channels that it has of a token.

On x86-64 CPUs where a C++ compiler is at hand, that product is ``pallas_kernels/cpu``'s, which takes less time. XLA
divides within a unit in the last place: what lies halfway between two int8 numbers it may round the other way.
``KVJAX_NATIVE=0`` leaves the product to it.

GPUs multiply the activations as they are: XLA converts the numbers to floats within the product.

float8_e4m3fn numbers become floats within the product, and where XLA would convert a matrix as a whole before it, a
block of outputs at a time: on CPUs, and on GPUs that have no float8.

Weights with a scale for each group of inputs have products of their own, ``pallas_kernels/quantised_matmul``: integers
on CPUs, in C++ where there is a compiler, with activations rounded in the same groups, and kernels elsewhere.

Measured on 2 cores with AVX-512 VNNI, [1, 1536] x [16384, 1536]: XLA's CPU compiler computes a product of int8 numbers
with one row by scalar code, 120 ms; with two rows it takes 1.9 ms, and in float32 4.5 ms; the C++ takes 0.8 ms with one
row. Weights that are converted to floats take 100 ms there, whatever the number of rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.model.group_quantised import GroupQuantised
from kvjax.model.quantised import Quantised, QuantisedArray, rounded
from pallas_kernels.cpu import products
from pallas_kernels.gpu import chip as gpu
from pallas_kernels.quantised_matmul import quantised_matmul as group_matmul
from pallas_kernels.quantised_matmul import weight_tiles

#: Outputs whose weights are floats at the same time: so many, or so small a part of all.
_BLOCK, _PARTS = 512, 64
_RUNS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def quantised_matmul(
    x: Float[Array, "*S K"], weight: Quantised, dtype: DTypeLike | None = None
) -> Float[Array, "*S N"]:
    """``x @ dequantised(weight).T``, in ``x``'s dtype or another.

    Its derivative by ``x`` is that product's, as if nothing were rounded; quantised weights have none.

    Raises:
      TypeError: it is differentiated by the weights.
    """
    return _multiplied(x, weight, jnp.dtype(dtype or x.dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _multiplied(x: Float[Array, "*S K"], weight: Quantised, dtype: jnp.dtype) -> Float[Array, "*S N"]:
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(weight, GroupQuantised):
        arrays = weight.values, weight.scale, weight.minimum
        found = group_matmul(rows, *arrays, fp8=weight.fp8, fp4=weight.fp4)
        return found.reshape(*x.shape[:-1], weight.shape[0]).astype(dtype)
    assert isinstance(weight, QuantisedArray)
    integers = _fine if weight.fine else _coarse
    forms = {"cpu": integers, "tpu": integers, "default": _weights_alone}
    if not weight.fp8 and rows.shape[0] and products.available():
        forms["cpu"] = functools.partial(products.int8_product, fine=weight.fine)
    if weight.fp8:
        forms = {"cpu": _by_blocks, "tpu": _by_integers, "default": _by_blocks if _without_fp8() else _weights_alone}
    found = jax.lax.platform_dependent(rows, weight.values, weight.scale, **forms)
    return found.reshape(*x.shape[:-1], weight.shape[0]).astype(dtype)


@functools.partial(_multiplied.defjvp, symbolic_zeros=True)
def _jvp(dtype: jnp.dtype, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The product, and its tangent by the activations'."""
    (x, weight), (x_dot, weight_dot) = primals, tangents
    zero = jax.custom_derivatives.SymbolicZero
    if not all(isinstance(leaf, zero) for leaf in jax.tree.leaves(weight_dot, is_leaf=lambda x: isinstance(x, zero))):
        raise TypeError("Quantised weights have no derivative: load the model with floats to train them.")
    found = _multiplied(x, weight, dtype)
    if isinstance(x_dot, zero):
        return found, jnp.zeros_like(found)
    return found, jnp.matmul(x_dot, weight.dequantised().astype(x_dot.dtype).T).astype(dtype)


def multiplies_runs(weight: Quantised | Array) -> bool:
    """Whether :func:`quantised_ragged_matmul` takes a stack of matrices, where it is quantised."""
    return not isinstance(weight, Quantised) or (isinstance(weight, QuantisedArray) and not weight.fp8)


def quantised_ragged_matmul(x: Float[Array, "T K"], weight: Quantised, runs: Int[Array, " E"]) -> Float[Array, "T N"]:
    """Products of consecutive runs of tokens, one a matrix [N, K] of a stack; ``runs`` are their lengths. For TPUs.

    Raises TypeError for weights that are quantised in groups or as float8, whose experts are gone through block by
    block.
    """
    if not isinstance(weight, QuantisedArray) or not multiplies_runs(weight):
        raise TypeError("Runs of experts are multiplied with weights of int8 that have a scale for each output.")
    which = jnp.repeat(jnp.arange(runs.shape[0]), runs, total_repeat_length=x.shape[0])
    whole, step = rounded(x)
    sums = jax.lax.ragged_dot_general(whole, weight.values, runs, _RUNS, preferred_element_type=jnp.int32)
    return (sums.astype(jnp.float32) * step * weight.scale[which]).astype(x.dtype)


def _product(x: Array, values: Array, kind: DTypeLike) -> Array:
    return jax.lax.dot_general(x, values, (((1,), (1,)), ((), ())), preferred_element_type=kind)


def _coarse(x: Float[Array, "S K"], values: Array, scale: Array) -> Float[Array, "S N"]:
    """Product with activations quantised once; a single row is padded with one of zeros, which matters on CPUs only."""
    whole, step = rounded(x)
    count = x.shape[0]
    if count == 1:
        whole = jnp.pad(whole, ((0, 1), (0, 0)))
    return _product(whole, values, jnp.int32)[:count].astype(jnp.float32) * step * scale


def _fine(x: Float[Array, "S K"], values: Array, scale: Array) -> Float[Array, "S N"]:
    """Product with activations as a sum of two int8 parts, which are twice the rows of one product."""
    first, step = rounded(x)
    second, finer = rounded(x.astype(jnp.float32) - first * step)
    sums = _product(jnp.concatenate([first, second]), values, jnp.int32).astype(jnp.float32)
    return (sums[: x.shape[0]] * step + sums[x.shape[0] :] * finer) * scale


def _weights_alone(x: Float[Array, "S K"], values: Array, scale: Array) -> Float[Array, "S N"]:
    floats = weight_tiles.fp8_typed(values) if values.dtype == jnp.uint8 else values
    return _product(x, floats.astype(x.dtype), jnp.float32) * scale


def _by_integers(x: Float[Array, "S K"], values: Array, scale: Array) -> Float[Array, "S N"]:
    return _product(x, weight_tiles.by_integers(values).astype(x.dtype), jnp.float32) * scale


def _without_fp8() -> bool:
    """Whether this is a GPU before those that have float8, where XLA makes floats of a whole matrix."""
    capability = gpu.target().capability
    return capability is not None and capability < (8, 9)


def _by_blocks(x: Float[Array, "S K"], values: Array, scale: Array) -> Float[Array, "S N"]:
    """The same in a loop over blocks of outputs, each of which is floats before it is multiplied."""
    outputs = values.shape[0]
    most = max(_BLOCK, outputs // _PARTS)
    block = next(size for size in range(min(outputs, most), 0, -1) if outputs % size == 0)

    def body(i: Int[Array, ""], found: Float[Array, "S N"]) -> Float[Array, "S N"]:
        part = weight_tiles.fp8_floats(jax.lax.dynamic_slice_in_dim(values, i * block, block), x.dtype)
        own = _product(x, jax.lax.optimization_barrier(part), jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(found, own, i * block, axis=1)

    found = jnp.zeros((x.shape[0], outputs), jnp.float32)
    return jax.lax.fori_loop(0, outputs // block, body, found) * scale
