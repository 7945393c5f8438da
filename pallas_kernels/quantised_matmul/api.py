"""``quantised_matmul``: activations times a matrix that is quantised in groups of inputs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import argument_checks, dispatch
from pallas_kernels.quantised_matmul import weight_tiles
from pallas_kernels.quantised_matmul.matmul_problem import Problem

IMPLEMENTATIONS = dispatch.Implementations(
    "quantised_matmul",
    "pallas_kernels.quantised_matmul",
    "quantised_matmul",
    {"cpu": ("native", "integers"), "tpu": ("tpu",), "gpu": ("triton",)},
)


def quantised_matmul(
    x: Float[Array, "S K"],
    values: Int[Array, "T M L"],
    scale: Float[Array, "G N"] | Int[Array, "G N"],
    minimum: Float[Array, "G N"] | Int[Array, "G N"] | None = None,
    *,
    fp8: bool = False,
    fp4: bool = False,
    implementation: str | None = None,
    **options: Any,
) -> Float[Array, "S N"]:
    """``x @ w.T``, float32, of the matrix w [N, K] that the other arguments stand for.

    A number q of w in group g is ``scale[g, n] * q``; where there are minima, of 8 bits ``scale * q + minimum``, and of
    4 bits ``scale * (q + 8) + minimum``.

    Args:
      x: activations.
      values: whole numbers in the layout of :func:`pallas_kernels.quantised_matmul.weight_tiles.packed`.
      scale, minimum: of each group of K / G inputs, which divides a tile of the layout; floats, or int16 with the bits
        of float16, both of the same kind.
      fp8: whether values are the bits of float8_e4m3fn numbers, int8, which XLA alone multiplies.
      fp4: whether q, of 4 bits, is a place among the float4_e2m1fn numbers: it stands for twice that number, see
        :func:`pallas_kernels.quantised_matmul.weight_tiles.fp4_numbers`. There are no minima then.
      implementation: the only one to try; by default the platform's in order, "xla" last. "native" and "integers", a
        CPU's, round each row's activations to int8 in the same groups; the others take them as they are.
      options: options of the implementation that is named: ``config`` (block sizes), ``interpret``.

    Raises:
      ValueError: an argument of another shape or type, or some that contradict each other.
      NotImplementedError: the implementation that was named cannot do this.
    """
    argument_checks.array("x", x, (None, None), argument_checks.FLOAT)
    argument_checks.array("values", values, (None, None, None), argument_checks.INTEGER)
    tiles, rows, tile = values.shape
    inputs, outputs = tiles * tile, rows * 8 // weight_tiles.bits_of(values)
    argument_checks.array("x", x, (None, inputs), argument_checks.FLOAT)
    kind = argument_checks.INTEGER if getattr(scale, "dtype", None) == jnp.int16 else argument_checks.FLOAT
    argument_checks.array("scale", scale, (None, outputs), kind)
    argument_checks.arrays(kind, minimum=(minimum, scale.shape))
    if not scale.shape[0] or inputs % scale.shape[0] or tile % (inputs // scale.shape[0]):
        raise ValueError(f"scale has {scale.shape[0]} groups of {inputs} inputs; give groups that divide {tile}.")
    if fp8 and values.dtype != jnp.int8:
        raise ValueError(f"values is {values.dtype}; give the bits of float8 numbers as int8.")
    if fp4 and (values.dtype != jnp.uint8 or minimum is not None):
        raise ValueError("Places of float4 numbers are uint8, two in a byte, and have no minima.")
    return IMPLEMENTATIONS.run(implementation, Problem(x, values, scale, minimum, fp8, fp4), **options)
