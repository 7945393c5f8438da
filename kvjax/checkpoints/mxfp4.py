"""MXFP4: 4-bit floats in blocks of 32 that share a power of two (OCP Microscaling Formats 1.0, section 5).

A number has a sign, two bits of exponent and one of mantissa (e2m1), a scale 8 bits of exponent alone (e8m0).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8

#: Numbers of a block.
NUMBERS = 32
#: Ends of the names of the two tensors that safetensors hold in the place of one: bytes of numbers, and scales.
PACKED = ("_blocks", "_scales")

_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_POSITIVE, -_POSITIVE])
#: [256, 2]: the numbers in the low and in the high half of a byte.
PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)
#: [256]: the power of two that a scale stands for; 255 is no number.
SCALES = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32("nan"))


def dequantized(blocks: UInt8[np.ndarray, "*S G 16"], scales: UInt8[np.ndarray, "*S G"]) -> Float[np.ndarray, "*S N"]:
    """Float32 numbers, 32 of each block; a byte has two that follow each other, the first in its low half.

    A scale of 255 gives numbers that are none.
    """
    numbers = PAIRS[blocks].reshape(*scales.shape, NUMBERS)
    with np.errstate(over="ignore"):  # what is beyond float32 is infinite, and said by the loader
        numbers *= SCALES[scales][..., None]
    return numbers.reshape(*scales.shape[:-1], -1)
