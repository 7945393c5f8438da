"""Weights of 4 or 8 bits with a scale, and maybe a minimum, for each group of an output's inputs.

This is the form of weights that are rounded to int4 here, and of those that files hold in groups: GGUF's Q8_0 and its
formats of 4, 5 and 6 bits, MXFP4, GPTQ, AWQ, compressed-tensors. A number of 4 bits s, from -8 to 7, stands for
``scale * s``, or, where there are minima, for ``scale * (s + 8) + minimum``; one of 8 bits for ``scale * s``, with
minima ``+ minimum``. A zero point z of a format whose numbers are ``scale * (q - z)`` is a minimum of ``-scale * z``,
which float32 holds exactly. Of MXFP4 a number of 4 bits is a place among the float4_e2m1fn numbers, and stands for
``scale`` times twice that number, which is whole.

``pallas_kernels/quantised_matmul`` has the layout of the numbers in memory, and the products.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.model.quantised import Quantised
from pallas_kernels.quantised_matmul import weight_tiles

#: Sizes of the groups that weights are rounded in, the largest first.
GROUPS = (128, 64, 32)
_Array = TypeVar("_Array", np.ndarray, jax.Array)


@dataclasses.dataclass(frozen=True)
class GroupFormat:
    """How a matrix is stored in groups.

    Attributes:
      bits: of a number, 4 or 8.
      group: inputs that share a scale, one of :data:`GROUPS` or, as GGUF's Q6_K has it, 16.
      minimum: whether they share a minimum too.
      scale: dtype of scales and minima: "bfloat16", "float32", or "float16", whose bits are stored as int16.
      fp8: whether numbers of 8 bits are float8_e4m3fn instead of whole ones.
      fp4: whether those of 4 bits are places among the float4_e2m1fn numbers; there are no minima then.
    """

    bits: int
    group: int
    minimum: bool = False
    scale: str = "bfloat16"
    fp8: bool = False
    fp4: bool = False

    def fits(self, outputs: int, inputs: int) -> bool:
        """Whether a matrix can be stored so: whole groups, and of numbers of 4 bits an even number of outputs."""
        return inputs % self.group == 0 and (self.bits == 8 or outputs % 2 == 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupQuantised(Quantised):
    """A matrix [N outputs, K inputs], or a stack of them, quantised in groups of an output's inputs.

    Attributes:
      values: int8 [..., K / T, N, T], or of 4 bits uint8 [..., K / T, N / 2, T]; see :func:`layout.packed`.
      scale: [..., K / G, N] of bfloat16 or float32, or of int16 with the bits of float16; see :func:`layout.floats`.
      minimum: [..., K / G, N] of the same, or None.
      dtype: of the activations that it is multiplied with, and of its numbers where they are looked at.
      fp8: whether values are the bits of float8_e4m3fn numbers.
      fp4: whether they are places among the float4_e2m1fn numbers; see :func:`layout.fp4_numbers`.
    """

    values: Any
    scale: Any
    minimum: Any
    dtype: Any = dataclasses.field(metadata={"static": True})
    fp8: bool = dataclasses.field(default=False, metadata={"static": True})
    fp4: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return weight_tiles.bits_of(self.values)

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, K] of the numbers, not of the bytes."""
        *stack, tiles, rows, tile = self.values.shape
        return *stack, rows * (8 // self.bits), tiles * tile

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.shape[-1] // self.scale.shape[-2]

    def dequantised(self) -> Float[Array, "*S N K"]:
        """See :meth:`Quantised.dequantised`."""
        minimum = self._minima
        by_row = None if minimum is None else minimum.swapaxes(-1, -2)
        return self._floats(weight_tiles.unpacked(self.values), self._steps.swapaxes(-1, -2), by_row)

    def rows(self, index: Int[Array, "*S"]) -> Float[Array, "*S K"]:
        """See :meth:`Quantised.rows`."""
        place = index.reshape(-1)
        minimum = self._minima
        by_row = None if minimum is None else minimum[:, place].T
        found = self._floats(weight_tiles.rows(self.values, place), self._steps[:, place].T, by_row)
        return found.reshape(*index.shape, -1)

    @property
    def _steps(self) -> Float[Array, "*S G N"]:
        return weight_tiles.floats(self.scale)

    @property
    def _minima(self) -> Float[Array, "*S G N"] | None:
        return weight_tiles.minima(self.values, self.scale, self.minimum)

    def _floats(self, whole: Int[Array, "*S N K"], scale: Array, minimum: Array | None) -> Float[Array, "*S N K"]:
        whole = weight_tiles.fp4_numbers(whole) if self.fp4 else whole
        wide = weight_tiles.fp8_floats(whole, jnp.float32) if self.fp8 else whole.astype(jnp.float32)
        grouped = wide.reshape(*scale.shape, -1) * scale[..., None]
        found = grouped if minimum is None else grouped + minimum[..., None]
        return found.reshape(whole.shape).astype(self.dtype)


def format_of(weights: str | GroupFormat | None, outputs: int, inputs: int) -> GroupFormat | None:
    """The format of groups in which a matrix of this size is stored; None where it is stored otherwise.

    "int4" is groups of 128, or of the largest size that fits; where none does, the matrix is stored as int8.
    """
    if isinstance(weights, GroupFormat) or weights is None:
        return weights
    formats = (GroupFormat(4, group) for group in GROUPS if weights == "int4")
    return next((form for form in formats if form.fits(outputs, inputs)), None)


def rounded_groups(rows: _Array, group: int) -> tuple[_Array, _Array]:
    """(int8 numbers of 4 bits [..., N, K], bfloat16 scales [..., N, K / G]) of floats; arrays of NumPy or JAX.

    Symmetric: a group's largest number becomes 7 or -7, and no number is off by more than half of the scale. Groups of
    zeros, or of numbers too small for float32, have scale 1, and of numbers that are not finite a scale that is not
    finite either.
    """
    xp: Any = np if isinstance(rows, np.ndarray) else jnp
    wide = rows.astype(xp.float32).reshape(*rows.shape[:-1], -1, group)
    scale = (xp.max(xp.abs(wide), axis=-1) * xp.float32(1 / 7)).astype(jnp.bfloat16)
    # A scale below the smallest normal number would be flushed to zero on some devices.
    scale = xp.where(scale < jnp.finfo(jnp.bfloat16).tiny, xp.ones((), jnp.bfloat16), scale)
    whole = xp.rint(wide / scale.astype(xp.float32)[..., None])
    return whole.astype(xp.int8).reshape(rows.shape), scale


def group_quantised(matrix: Float[Array, "*S N K"], form: GroupFormat, dtype: DTypeLike) -> GroupQuantised:
    """A matrix with its inputs last, rounded to 4 bits; in a format of other numbers, which files hold, as zeros are.

    So a model's shapes are found without any numbers.
    """
    whole, scale = rounded_groups(matrix, form.group)
    scale = scale.astype(form.scale).swapaxes(-1, -2)
    if form.scale == "float16":
        scale = jax.lax.bitcast_convert_type(scale, jnp.int16)
    minimum = jnp.zeros_like(scale) if form.minimum else None
    values = weight_tiles.packed(whole, form.bits, form.group)
    return GroupQuantised(values, scale, minimum, jnp.dtype(dtype), form.fp8, form.fp4)
