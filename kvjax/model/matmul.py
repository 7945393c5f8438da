"""Products in the forms that CPUs compute fastest; other platforms gain nothing.

On x86-64 CPUs where a C++ compiler is at hand, several float32 rows are multiplied by ``pallas_kernels/cpu``. Up to 32
are bound by reading the weight, which it reads as fast as memory gives it, more by arithmetic. On 2 cores that read 31
GB/s and multiply 230 GFLOP/s, it takes of the time of XLA's forms below, for weights [N, K] and [K, N]: 0.7 and 0.9 for
2 rows, 0.7 and 0.4 for 8, 0.8 and 0.9 for 64, 0.9 for 256. ``KVJAX_NATIVE=0`` leaves the product to XLA.

XLA's CPU compiler reads weights at very different speeds. Measured on 2 cores that read 80 GB/s (float32, weights of a
135M model, all of a step in a chain):

* One row. A plain product with ``[K, N]`` runs on one core (40 GB/s); a batch of part sums on both (57), and where the
  weight is ``[N, K]`` a batch of parts of N (65; a vocabulary's as a plain product 75).
* 3 to 24 rows. With ``[K, N]`` a plain product goes to a library (31 GB/s for 8 rows), one that contracts both leading
  axes to Eigen (36); a vocabulary gains nothing from it, and 32 rows take 60 % longer. With ``[N, K]`` a plain product
  reads 24 GB/s, a batch of two halves of N with the rows as columns 35.

So wide weights, most of what a step reads, are stored as ``[N, K]``. Quantised ones always are, and have products of
their own (``quantised_matmul.py``).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.model.quantised import Quantised
from kvjax.model.quantised_matmul import quantised_matmul, quantised_ragged_matmul
from pallas_kernels.cpu import float_products

#: Columns of a weight, of its rows, beyond which it is a vocabulary's.
_WIDE = 16


def matmul(x: Float[Array, "*S K"], weight: Float[Array, "K N"] | Quantised) -> Float[Array, "*S N"]:
    """``x @ weight``."""
    if isinstance(weight, Quantised):
        return quantised_matmul(x, weight)
    if _is_native(x, weight):
        return _native(x, weight, False)
    rows, (inner, columns) = x.reshape(-1, x.shape[-1]), weight.shape
    if rows.shape[0] == 1 and columns <= _WIDE * inner and x.dtype == jnp.float32:
        found = jax.lax.platform_dependent(rows, weight, cpu=_one_row, default=jnp.matmul)
        return found.reshape(*x.shape[:-1], -1)
    if not 3 <= rows.shape[0] <= 24 or columns > _WIDE * inner:
        return x @ weight
    # The barrier keeps the compiler from folding the transpose back into a plain product.
    transposed = jax.lax.optimization_barrier(rows.T)
    return jax.lax.dot_general(transposed, weight, (((0,), (0,)), ((), ()))).reshape(*x.shape[:-1], -1)


def matmul_nt(
    x: Float[Array, "*S K"], weight: Float[Array, "N K"] | Quantised, dtype: DTypeLike | None = None
) -> Float[Array, "*S N"]:
    """``x @ weight.T``, in ``x``'s dtype or another."""
    if isinstance(weight, Quantised):
        return quantised_matmul(x, weight, dtype)
    if _is_native(x, weight):
        return _native(x, weight, True).astype(dtype or x.dtype)
    rows, (columns, inner) = x.reshape(-1, x.shape[-1]), weight.shape
    few = 1 <= rows.shape[0] <= 32 and x.dtype == weight.dtype == jnp.float32
    if not few or (rows.shape[0] == 1 and columns > _WIDE * inner):
        return _plain_nt(x, weight, dtype)
    form = _one_row_nt if rows.shape[0] == 1 else _few_rows_nt
    found = jax.lax.platform_dependent(rows, weight, cpu=form, default=_plain_nt)
    return found.reshape(*x.shape[:-1], -1).astype(dtype or x.dtype)


def ragged_matmul(
    x: Float[Array, "T K"], weights: Float[Array, "E K N"] | Quantised, runs: Int[Array, " E"]
) -> Float[Array, "T N"]:
    """Products of consecutive runs of tokens, one a matrix; ``runs`` are their lengths."""
    if isinstance(weights, Quantised):
        return quantised_ragged_matmul(x, weights, runs)
    return jax.lax.ragged_dot(x, weights, runs)


def _is_native(x: Array, weight: Array) -> bool:
    """Whether the product is C++'s, where there is a compiler."""
    floats = x.dtype == weight.dtype == jnp.float32 and weight.size > 0
    return floats and x.size > x.shape[-1] and float_products.available()


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _native(x: Float[Array, "*S K"], weight: Float[Array, "A B"], transposed: bool) -> Float[Array, "*S N"]:
    """``x @ weight``, or with the weight transposed, on CPUs by C++."""
    native = functools.partial(float_products.float_product, transposed=transposed)
    plain = functools.partial(_plain, transposed=transposed)
    found = jax.lax.platform_dependent(x.reshape(-1, x.shape[-1]), weight, cpu=native, default=plain)
    return found.reshape(*x.shape[:-1], -1)


@functools.partial(_native.defjvp, symbolic_zeros=True)
def _native_jvp(transposed: bool, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The product, and its tangent by what has one."""
    zero = jax.custom_derivatives.SymbolicZero
    (x, weight), (x_dot, weight_dot) = primals, tangents
    found = _native(x, weight, transposed)
    terms = [] if isinstance(x_dot, zero) else [_plain(x_dot, weight, transposed)]
    if not isinstance(weight_dot, zero):
        terms.append(_plain(x, weight_dot, transposed))
    return found, sum(terms, jnp.zeros_like(found))


def _plain(x: Float[Array, "*S K"], weight: Float[Array, "A B"], transposed: bool) -> Float[Array, "*S N"]:
    return _plain_nt(x, weight) if transposed else x @ weight


def _parts(size: int, *counts: int) -> int:
    """The first of these counts that divides a size, or 1."""
    return next((count for count in counts if size % count == 0), 1)


def _one_row(x: Float[Array, "1 K"], weight: Float[Array, "K N"]) -> Float[Array, "1 N"]:
    """The sum of the products of 6 parts of K (or 8, 4, 2: what divides it), which run beside one another."""
    inner, columns = weight.shape
    parts = _parts(inner, 6, 8, 4, 2)
    return jnp.einsum("pk,pkn->pn", x.reshape(parts, -1), weight.reshape(parts, -1, columns)).sum(0, keepdims=True)


def _plain_nt(
    x: Float[Array, "*S K"], weight: Float[Array, "N K"], dtype: DTypeLike | None = None
) -> Float[Array, "*S N"]:
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, axes, preferred_element_type=dtype or x.dtype)


def _one_row_nt(x: Float[Array, "1 K"], weight: Float[Array, "N K"]) -> Float[Array, "1 N"]:
    """4 parts of N (or 2), which run beside one another."""
    columns, inner = weight.shape
    parts = _parts(columns, 4, 2)
    each = jnp.broadcast_to(x[0], (parts, inner))
    return jnp.einsum("pnk,pk->pn", weight.reshape(parts, -1, inner), each).reshape(1, columns)


def _few_rows_nt(x: Float[Array, "S K"], weight: Float[Array, "N K"]) -> Float[Array, "S N"]:
    """Halves of N, the rows as columns: what the weights' rows are multiplied with is small and lies in order."""
    (count, inner), columns = x.shape, weight.shape[0]
    parts = _parts(columns, 2)
    # The barrier: as in :func:`matmul`.
    each = jax.lax.optimization_barrier(jnp.broadcast_to(x.T, (parts, inner, count)))
    return jnp.einsum("pnk,pks->pns", weight.reshape(parts, -1, inner), each).reshape(columns, count).T
