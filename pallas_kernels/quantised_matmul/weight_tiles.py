"""The memory layout of matrices that are quantised in groups of inputs: whole numbers in tiles, scales by group.

Numbers lie in tiles of 128 inputs, [K / 128, N, 128]: a CPU's batched product wants its batch first, a TPU's lanes are
128, and a GPU reads a tile of some outputs as one run of bytes. Of two outputs that follow each other, numbers of 4
bits share a byte: a TPU unpacks a register by looking at it as one of another type, a mesh divides inputs and outputs
alike, and bytes are counted truly (JAX counts an element of its own int4 as a byte, and CPUs store it as one).
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

#: Inputs of a tile, where their number is a multiple of it.
TILE = 128
#: What is added to a number of 4 bits where there are minima.
OFFSET = 8
_Array = TypeVar("_Array", np.ndarray, jax.Array)


def tile_of(inputs: int, group: int) -> int:
    """T: :data:`TILE`, or the largest smaller multiple of the group that divides the inputs, which it divides too.

    Raises:
      ValueError: the group is larger than a tile, or does not divide the inputs.
    """
    tiles = [tile for tile in range(group, TILE + 1, group) if inputs % tile == 0]
    if not tiles:
        raise ValueError(f"Groups of {group} inputs do not fit {inputs}, or are beyond {TILE}.")
    return tiles[-1]


def packed(whole: _Array, bits: int, group: int) -> _Array:
    """Values in their layout, of int8 numbers [..., N, K]; arrays of NumPy or JAX, as they are.

    Returns:
      Of 8 bits int8 [..., K / T, N, T]; of 4 bits uint8 [..., K / T, N / 2, T], a byte of which has the number of
      output 2 n in its low half and that of 2 n + 1 in its high one, each in two's complement.
    """
    xp: Any = np if isinstance(whole, np.ndarray) else jnp
    *stack, outputs, inputs = whole.shape
    tile = tile_of(inputs, group)
    tiles: Any = whole.reshape(*stack, outputs, inputs // tile, tile).swapaxes(-2, -3)
    if bits == 8:
        return xp.ascontiguousarray(tiles) if xp is np else tiles
    low, high = (tiles[..., start::2, :].astype(xp.uint8) for start in (0, 1))
    return (low & 15) | (high << 4)


def bits_of(values: Any) -> int:
    """Bits of a number."""
    return 4 if values.dtype == jnp.uint8 else 8


def signed(values: Int[Array, "*S T N L"]) -> Int[Array, "*S T M L"]:
    """int8 numbers [..., K / T, N, T] of values in their layout."""
    if bits_of(values) == 8:
        return values
    halves = jnp.stack([values & 15, values >> 4], axis=-2)
    return (halves ^ 8).astype(jnp.int8).reshape(*values.shape[:-2], -1, values.shape[-1]) - 8


def unpacked(values: Int[Array, "*S T N L"]) -> Int[Array, "*S M K"]:
    """The int8 numbers [..., N, K] that were :func:`packed`."""
    whole = signed(values).swapaxes(-2, -3)
    return whole.reshape(*whole.shape[:-2], -1)


def rows(values: Int[Array, "T N L"], index: Int[Array, " R"]) -> Int[Array, "R K"]:
    """The int8 numbers of some outputs."""
    if bits_of(values) == 8:
        found = values[:, index]
    else:
        shift = (4 * (index % 2)).astype(jnp.uint8)
        found = ((values[:, index // 2] >> shift[:, None] & 15) ^ 8).astype(jnp.int8) - 8
    return found.swapaxes(0, 1).reshape(index.size, -1)


def floats(scale: Array) -> Float[Array, "*S G N"]:
    """Scales, or minima, in float32: floats, or int16 with the bits of float16.

    Those of float16 are stored so because a TPU's kernels know no such type, and XLA would copy them for every product.
    """
    if scale.dtype == jnp.int16:
        scale = jax.lax.bitcast_convert_type(scale, jnp.float16)
    return scale.astype(jnp.float32)


def minima(values: Array, scale: Array, minimum: Array | None) -> Float[Array, "*S G N"] | None:
    """The numbers added to products of numbers and scales, float32: minima count from the least number of 4 bits."""
    if minimum is None:
        return None
    offset = OFFSET if bits_of(values) == 4 else 0
    return floats(minimum) + offset * floats(scale)


def fp8_floats(bits: Int[Array, "*S"], dtype: DTypeLike) -> Float[Array, "*S"]:
    """The numbers of float8_e4m3fn by their bits, int8 or uint8, none of which is no number.

    XLA's CPU compiler turns arrays of float8 into arrays of float16 as a whole, before a loop over their parts, so that
    they are stored by their bits.
    """
    return jax.lax.platform_dependent(
        bits,
        cpu=lambda bits: _by_float16(bits).astype(dtype),
        tpu=lambda bits: by_integers(bits).astype(dtype),
        default=lambda bits: fp8_typed(bits).astype(dtype),
    )


def fp8_typed(bits: Int[Array, "*S"]) -> Float[Array, "*S"]:
    """An array of float8_e4m3fn."""
    return jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)


def by_integers(bits: Int[Array, "*S"]) -> Float[Array, "*S"]:
    """float32 numbers by wider bits first: a copy as float8 would be moved out of a loop, and kept beside the bits."""
    wide = bits.astype(jnp.int32) & 0xFF
    # Numbers without an exponent have that of 1, less what it stands for.
    small = (wide & 0x78) == 0
    exponent = jnp.where(small, jnp.int32(121), jnp.int32(120)) << 23
    found = jax.lax.bitcast_convert_type(((wide & 0x7F) << 20) + exponent, jnp.float32)
    found = jnp.where(small, found - jnp.float32(2**-6), found)
    return jnp.where(wide > 127, -found, found)


def fp4_numbers(place: _Array) -> _Array:
    """Twice the float4_e2m1fn number of each place: 0 to 7 for 0, 0.5, 1, 1.5, 2, 3, 4, 6, and below 0 their negatives.

    In any dtype that holds 28; arrays of NumPy or JAX. From 4 to 6 numbers are twice as far apart as before, and beyond
    four times, so that ``4 q`` less what is closer gives them without a table, which kernels have no instruction for.
    """
    return 4 * place - place.clip(-4, 4) - 2 * place.clip(-6, 6)


def _by_float16(bits: Int[Array, "*S"]) -> Float[Array, "*S"]:
    """float32 numbers; those of float16 with the same exponent and mantissa are 2^8 times smaller."""
    wide = jax.lax.bitcast_convert_type(bits, jnp.uint8).astype(jnp.uint16)
    half = jax.lax.bitcast_convert_type((wide & 0x80) << 8 | (wide & 0x7F) << 7, jnp.float16)
    return half.astype(jnp.float32) * 256
