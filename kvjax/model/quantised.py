"""Weights as int8 numbers with a float32 scale for each output: a quarter of float32's bytes, a half of bfloat16's.

Symmetric rounding: a row w of a matrix [N outputs, K inputs] becomes round(w / s) with s = max |w| / 127, so that no
number is off by more than s / 2. Rows lie in order, because CPUs multiply them several times as fast as columns.

qwix's core does the same. It is not used: it rounds on the device, where here rows are rounded on the host as they are
read, and its product knows neither the form that CPUs want for one row nor that GPUs want the weights alone rounded.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.errors import UsageError, quoted

#: How a model's matrices may be stored, other than as floats.
Weights = Literal["int8"]
_LARGEST = 127
_Array = TypeVar("_Array", np.ndarray, jax.Array)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantisedArray:
    """A matrix, or a stack of them, that stands for ``values * scale[..., None]``.

    Attributes:
      values: int8 [..., N outputs, K inputs]; an embedding's outputs are its tokens.
      scale: float32 [..., N], none of them 0.
      dtype: of the activations that it is multiplied with, and of its numbers where they are looked at.
      fine: whether activations that are rounded too have two int8 parts, the second of what the first leaves.
    """

    values: Any
    scale: Any
    dtype: Any = dataclasses.field(metadata={"static": True})
    fine: bool = dataclasses.field(default=False, metadata={"static": True})

    def __getitem__(self, index: Any) -> QuantisedArray:
        """Itself for ``...``, which is how a parameter's value is asked for."""
        if index is not ...:
            raise TypeError("A quantised matrix has no parts; use rows_of or dequantised.")
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of ``values``."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """Axes of ``values``."""
        return self.values.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers and of their scales."""
        return self.values.nbytes + self.scale.nbytes


def check_weights(weights: Any) -> Weights | None:
    """The kind of weights asked for, None for floats; UsageError for one that there is not."""
    known = get_args(Weights)
    if weights is not None and weights not in known:
        choices = " or ".join(map(repr, known))
        raise UsageError(f"weights is {quoted(weights)}; choose {choices}, or None for floats of the model's dtype.")
    return weights


def rounded(rows: _Array, axes: int | tuple[int, ...] = -1) -> tuple[_Array, _Array]:
    """(int8 values, float32 scales whose ``axes`` have length 1) of floats; arrays of NumPy or JAX, as they are.

    Zeros have scale 1. Numbers that are not finite have a scale that is not finite either.
    """
    # XLA multiplies by the inverse where a number is divided by a constant, and the host does as devices do.
    xp: Any = np if isinstance(rows, np.ndarray) else jnp
    wide = rows.astype(xp.float32)
    scale = xp.max(xp.abs(wide), axis=axes, keepdims=True) * xp.float32(1 / _LARGEST)
    scale = xp.where(scale == 0, xp.float32(1), scale)
    return xp.rint(wide / scale).astype(xp.int8), scale


def quantised(matrix: Float[Array, "*S N K"], dtype: DTypeLike, fine: bool = False) -> QuantisedArray:
    """A matrix with its inputs last, rounded."""
    values, scale = rounded(matrix)
    return QuantisedArray(values, scale[..., 0], jnp.dtype(dtype), fine)


def dequantised(weight: Any) -> Any:
    """A weight's numbers as floats: an array of JAX as it is."""
    if not isinstance(weight, QuantisedArray):
        return weight
    return (weight.values * weight.scale[..., None]).astype(weight.dtype)


def rows_of(table: Any, index: Int[Array, "*S"]) -> Float[Array, "*S M"]:
    """Rows of an embedding, as floats."""
    if not isinstance(table, QuantisedArray):
        return table[index]
    return (table.values[index] * table.scale[index][..., None]).astype(table.dtype)
