"""Products of float32 blocks in the TPU's matrix unit, which multiplies bfloat16: each number is cut into three.

Of nine products of parts the six largest are summed, as ``Precision.HIGHEST`` does. There the compiler loads all six
weights and holds a block's parts in registers, hundreds more than there are; here a part is loaded once for all that it
is multiplied with, tile by tile (8 queries, D = 128, 512 slots: 834 to 538 cycles on v6e; libtpu 0.0.50).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float

PARTS = 3
#: What keeps only the sign, exponent and seven bits of a float32 that bfloat16 holds too.
_HIGH_HALF = -0x10000


def stacked_parts(x: Float[Array, "*B G N"]) -> BFloat16[Array, "*B P N"]:
    """[..., 3G, N], largest parts first; G is a multiple of 8, whole registers."""
    return jnp.concatenate(rounded_parts(x), axis=-2)


def rounded_parts(x: Array) -> list[Array]:
    """Largest first, for one of a product's sides.

    Rounded, so that what the products leave out is of either sign; by bits, as XLA may take a conversion there and back
    to be none.
    """
    return _parts(x, lambda x: _number((_bits(x) + jnp.int32(0x8000)) & jnp.int32(_HIGH_HALF)))


def cut_parts(x: Array) -> list[Array]:
    """Largest first. Cut off, not rounded: fewer instructions, and no less exact while the other side is rounded."""
    return _parts(x, lambda x: _number(_bits(x) & jnp.int32(_HIGH_HALF)))


def product(
    a: BFloat16[Array, "P N"], shape: tuple[int, int], load: Callable[..., Array], tile: tuple[int, int], axis: int
) -> Float[Array, "G M"]:
    """Of stacked parts, P = 3G, and a float32 block of this shape, contracted over the block's axis.

    Args:
      load: (first row, rows, first lane, lanes) of the block. tile: of how many rows and lanes at a time.
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
    """In bfloat16, summed in float32, contracted over b's axis."""
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _tile(a: Array, block: Array, axis: int) -> Array:
    rows = a.shape[0] // PARTS
    parts = enumerate(cut_parts(block))
    by_high, by_middle, by_low = (dot(a[: (PARTS - i) * rows], x, axis) for i, x in parts)
    # The smallest first.
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
