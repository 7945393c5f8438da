"""Float32 products in the TPU's matrix unit, which multiplies bfloat16: each number is split into three of bfloat16.

Of the nine products of parts the six largest are summed, as for ``Precision.HIGHEST``. With that precision the compiler
loads the weights six times and keeps a block's parts in registers, hundreds more than there are. Here a part is loaded
once for everything it is multiplied with, tile by tile (8 queries, D = 128, 512 slots: 538 cycles on v6e instead of
834; libtpu 0.0.50).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float

PARTS = 3
#: Mask that keeps the sign, the exponent and the seven bits of a float32's fraction that bfloat16 has.
_HIGH_HALF = -0x10000


def stacked_parts(x: Float[Array, "*B G N"]) -> BFloat16[Array, "*B P N"]:
    """Parts of [..., G, N] stacked to [..., 3G, N], largest first; G is a multiple of 8, whole registers."""
    return jnp.concatenate(rounded_parts(x), axis=-2)


def rounded_parts(x: Array) -> list[Array]:
    """Split into three bfloat16 parts, largest first, by rounding; for one side of a product.

    Rounded, so that the products that are left out have either sign. Done on the bits: XLA may remove a conversion to
    bfloat16 and back.
    """
    return _parts(x, lambda x: _number((_bits(x) + jnp.int32(0x8000)) & jnp.int32(_HIGH_HALF)))


def cut_parts(x: Array) -> list[Array]:
    """Split into three bfloat16 parts, largest first, by truncation; for the other side of a product.

    Fewer instructions than rounding, and as exact while the other side is rounded.
    """
    return _parts(x, lambda x: _number(_bits(x) & jnp.int32(_HIGH_HALF)))


def product(
    a: BFloat16[Array, "P N"], shape: tuple[int, int], load: Callable[..., Array], tile: tuple[int, int], axis: int
) -> Float[Array, "G M"]:
    """Product of stacked parts (P = 3G) and a float32 block of this shape, contracted over the block's ``axis``.

    Args:
      load: reads (first row, rows, first lane, lanes) of the block. tile: rows and lanes multiplied at a time.
    """
    rows, lanes = (range(0, size, step) for size, step in zip(shape, tile, strict=True))

    def of(row: int, lane: int) -> Array:
        height, width = min(tile[0], shape[0] - row), min(tile[1], shape[1] - lane)
        left = a[:, row : row + height] if axis == 0 else a[:, lane : lane + width]
        return _tile(left, load(row, height, lane, width), axis)

    if axis == 0:
        return jnp.concatenate([_sum(of(row, lane) for row in rows) for lane in lanes], axis=1)
    return jnp.concatenate([_sum(of(row, lane) for lane in lanes) for row in rows], axis=1)


def dot(a: Array, b: Array, axis: int) -> Array:
    """Product in bfloat16 with float32 sums, contracted over b's ``axis``."""
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _tile(a: Array, block: Array, axis: int) -> Array:
    rows = a.shape[0] // PARTS
    parts = enumerate(cut_parts(block))
    by_high, by_middle, by_low = (dot(a[: (PARTS - i) * rows], x, axis) for i, x in parts)
    # Smallest first, for the least rounding error.
    small = by_high[2 * rows :] + by_middle[rows:] + by_low
    return by_high[:rows] + (by_high[rows : 2 * rows] + by_middle[:rows] + small)


def _parts(x: Array, shortened: Callable[[Array], Array]) -> list[Array]:
    high = shortened(x)
    rest = x - high
    middle = shortened(rest)
    return [y.astype(jnp.bfloat16) for y in (high, middle, rest - middle)]


def _sum(found: Any) -> Array:
    return functools.reduce(jnp.add, found)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _number(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.float32)
