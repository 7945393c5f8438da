"""Weights of 8 bits with a float32 scale for each output: a quarter of float32's bytes, a half of bfloat16's.

Symmetric rounding: a row w of a matrix [N outputs, K inputs] becomes round(w / s) with s = max |w| / 127, so that no
int8 number is off by more than s / 2; a float8_e4m3fn one, with s = max |w| / 448, by more than a 16th of itself, or
s / 1024. Rows lie in order, because CPUs multiply them several times as fast as columns. Forms
with a scale for each group of inputs are in ``group_quantised.py``.

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

from kvjax.array_bytes import nbytes
from kvjax.errors import UsageError, quoted
from pallas_kernels.quantised_matmul import weight_tiles

#: How a model's matrices may be stored, other than as floats.
Weights = Literal["int8", "int4", "fp8", "file"]
#: The dtype in which numbers of weights that are called so are stored: of float8_e4m3fn, their bits.
NUMBERS: dict[str, Any] = {"int8": jnp.int8, "fp8": jnp.uint8}
_LARGEST, _LARGEST_FP8 = 127, 448
_Array = TypeVar("_Array", np.ndarray, jax.Array)


class Quantised:
    """A matrix [..., N outputs, K inputs] in another form than an array; subclasses are pytrees of its arrays.

    Attributes:
      values, scale: its numbers, in the order that the subclass says, and what they are multiplied by.
      dtype: of the activations that it is multiplied with, and of its numbers where they are looked at.
    """

    values: Any
    scale: Any
    dtype: Any

    def __getitem__(self, index: Any) -> Quantised:
        """Itself for ``...``, which is how a parameter's value is asked for."""
        if index is not ...:
            raise TypeError("A quantised matrix has no parts; use rows_of or dequantised.")
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, K]."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """Axes of the shape."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return nbytes(self)

    def dequantised(self) -> Float[Array, "*S N K"]:
        """Its numbers, in ``dtype``."""
        raise NotImplementedError

    def rows(self, index: Int[Array, "*S"]) -> Float[Array, "*S K"]:
        """Rows of a single matrix, in ``dtype``."""
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantisedArray(Quantised):
    """A matrix, or a stack of them, that stands for ``values * scale[..., None]``.

    Attributes:
      values: int8 [..., N outputs, K inputs], or uint8, which are the bits of float8_e4m3fn numbers; an embedding's
        outputs are its tokens.
      scale: float32 [..., N], none of them 0.
      dtype: of the activations that it is multiplied with, and of its numbers where they are looked at.
      fine: whether activations that are rounded too, as int8 weights' are, have two int8 parts, the second of what the
        first leaves.
    """

    values: Any
    scale: Any
    dtype: Any = dataclasses.field(metadata={"static": True})
    fine: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of ``values``."""
        return self.values.shape

    def dequantised(self) -> Float[Array, "*S N K"]:
        """See :meth:`Quantised.dequantised`."""
        return (self._floats(self.values) * self.scale[..., None]).astype(self.dtype)

    def rows(self, index: Int[Array, "*S"]) -> Float[Array, "*S K"]:
        """See :meth:`Quantised.rows`."""
        return (self._floats(self.values[index]) * self.scale[index][..., None]).astype(self.dtype)

    @property
    def fp8(self) -> bool:
        """Whether values are the bits of float8_e4m3fn numbers."""
        return self.values.dtype == jnp.uint8

    def _floats(self, values: Int[Array, "*S"]) -> Float[Array, "*S"]:
        return weight_tiles.fp8_floats(values, jnp.float32) if self.fp8 else values.astype(jnp.float32)


def check_weights(weights: Any) -> Weights | None:
    """The kind of weights asked for, None for floats; UsageError for one that there is not."""
    known = get_args(Weights)
    if weights is not None and weights not in known:
        *others, last = map(repr, known)
        choices = f"{', '.join(others)} or {last}"
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


def rounded_to(numbers: DTypeLike, rows: _Array, axes: int | tuple[int, ...] = -1) -> tuple[_Array, _Array]:
    """:func:`rounded`, or, of uint8, the bits in float8_e4m3fn; zeros, and rows too small, have scale 1 there too."""
    if jnp.dtype(numbers) == jnp.int8:
        return rounded(rows, axes)
    xp: Any = np if isinstance(rows, np.ndarray) else jnp
    wide = rows.astype(xp.float32)
    scale = xp.max(xp.abs(wide), axis=axes, keepdims=True) * xp.float32(1 / _LARGEST_FP8)
    scale = xp.where(scale < jnp.finfo(jnp.float32).tiny, xp.float32(1), scale)
    found: Any = (wide / scale).astype(jnp.float8_e4m3fn)
    bits: Any = found.view(np.uint8) if xp is np else jax.lax.bitcast_convert_type(found, jnp.uint8)
    return bits, scale


def quantised(
    matrix: Float[Array, "*S N K"], dtype: DTypeLike, fine: bool = False, numbers: DTypeLike = jnp.int8
) -> QuantisedArray:
    """A matrix with its inputs last, rounded."""
    values, scale = rounded_to(numbers, matrix)
    return QuantisedArray(values, scale[..., 0], jnp.dtype(dtype), fine)


def dequantised(weight: Any) -> Any:
    """A weight's numbers as floats: an array of JAX as it is."""
    return weight.dequantised() if isinstance(weight, Quantised) else weight


def rows_of(table: Any, index: Int[Array, "*S"]) -> Float[Array, "*S M"]:
    """Rows of an embedding, as floats."""
    return table.rows(index) if isinstance(table, Quantised) else table[index]
