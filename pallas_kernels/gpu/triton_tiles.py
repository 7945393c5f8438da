"""Loads, products and block sizes that the Triton kernels share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import argument_checks


def check_sizes(queries: int, keys: int, warps: int, stages: int) -> None:
    """Raise ``ValueError`` for block sizes or compiler options that Triton cannot take."""
    argument_checks.block_size("queries", queries, 16)
    argument_checks.block_size("keys", keys, 16)
    argument_checks.block_size("warps", warps, 1)
    argument_checks.at_least("stages", stages, 1)


def i32(value: int) -> Array:
    """``value`` as int32, also where JAX's default integers have 64 bits."""
    return jnp.int32(value)


def up(value: Array, size: int) -> Array:
    """``value / size`` rounded up; 0 for a negative value."""
    return jax.lax.div(jnp.maximum(value, 0) + i32(size - 1), i32(size))


def lanes(count: int, dim: int) -> Int[Array, "N E"]:
    """Column indices of ``count`` rows; E is ``dim`` rounded up to a power of two, as Triton's arrays must be."""
    return jax.lax.broadcasted_iota(jnp.int32, (count, pl.next_power_of_2(dim)), 1)


def rows_of(x: Any, row: Int[Array, " N"], valid: Bool[Array, " N"], dim: int) -> Float[Array, "N E"]:
    """Load rows of a [rows, D] array; zeros for rows that are masked and for columns from D on."""
    lane = lanes(row.shape[0], dim)
    mask = valid[:, None] & (lane < dim)
    return plt.load(x.at[jnp.broadcast_to(row[:, None], lane.shape), lane], mask=mask, other=0.0)


def dot(a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    """``a @ b`` with float32 sums; float32 operands are not rounded to TF32."""
    return plt.dot(a, b, precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)


def dot_rows(a: Float[Array, "M K"], b: Float[Array, "N K"]) -> Float[Array, "M N"]:
    """``a @ b.T``."""
    return dot(a, b.T)
