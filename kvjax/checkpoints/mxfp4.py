"""MXFP4: 4-bit floats in blocks of 32 that share a power of two (OCP Microscaling Formats 1.0, section 5).

A number has a sign, two bits of exponent and one of mantissa (e2m1), a scale 8 bits of exponent alone (e8m0).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import BFloat16, Float, Int8, UInt8

from kvjax.checkpoints.checkpoint import Format, Numbers
from kvjax.checkpoints.stored import Stored
from kvjax.errors import WeightsError, quoted
from kvjax.model.group_quantised import GroupFormat

#: Numbers of a block.
NUMBERS = 32
#: How its numbers are kept: a product's are twice float4's, and scales half as large.
MXFP4 = GroupFormat(4, NUMBERS, scale="bfloat16", fp4=True)
#: Ends of the names of the two tensors that safetensors hold in the place of one: bytes of numbers, and scales.
_PACKED = ("_blocks", "_scales")

_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_POSITIVE, -_POSITIVE])
#: [256, 2]: the numbers in the low and in the high half of a byte.
PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)
#: [256]: the power of two that a scale stands for; 255 is no number.
SCALES = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32("nan"))
#: [256]: the half of it; no number where a block's largest would be beyond float32.
_HALVED = np.append(np.ldexp(np.float32(1), np.arange(-128, 125)), [np.float32("nan")] * 3).astype(jnp.bfloat16)
#: [16]: the place of a number, by its bits, among the 15 that there are.
_PLACES = np.concatenate([np.arange(8), -np.arange(8)]).astype(np.int8)


def places(codes: UInt8[np.ndarray, "*S"]) -> Int8[np.ndarray, "*S"]:
    """The places of numbers of 4 bits among float4's, as :data:`MXFP4` has them."""
    return _PLACES[codes]


def halved(scales: UInt8[np.ndarray, "*S"]) -> BFloat16[np.ndarray, "*S"]:
    """Half of what scales stand for."""
    return _HALVED[scales]


def dequantized(blocks: UInt8[np.ndarray, "*S G 16"], scales: UInt8[np.ndarray, "*S G"]) -> Float[np.ndarray, "*S N"]:
    """Float32 numbers, 32 of each block; a byte has two that follow each other, the first in its low half.

    A scale of 255 gives numbers that are none.
    """
    numbers = PAIRS[blocks].reshape(*scales.shape, NUMBERS)
    with np.errstate(over="ignore"):  # what is beyond float32 is infinite, and said by the loader
        numbers *= SCALES[scales][..., None]
    return numbers.reshape(*scales.shape[:-1], -1)


@dataclasses.dataclass(frozen=True, eq=False)
class Mxfp4Experts:
    """Experts [E, M, N] of blocks [E, N, M / 32, 16] and scales [E, N, M / 32]."""

    blocks: Stored
    scales: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, M, N]."""
        experts, outputs, blocks, _ = self.blocks.shape
        return experts, blocks * NUMBERS, outputs

    @property
    def format(self) -> Format:
        """All of its numbers."""
        return MXFP4

    def read(self, start: int, stop: int) -> np.ndarray:
        """Some experts as float32."""
        return dequantized(self.blocks.read(start, stop), self.scales.read(start, stop)).swapaxes(1, 2)

    def numbers(self, start: int, stop: int) -> Numbers:
        """Some experts with their inputs last: places [E, N, M] and scales [E, N, M / 32]."""
        blocks, scales = self.blocks.read(start, stop), self.scales.read(start, stop)
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1)
        return Numbers(places(codes).reshape(*scales.shape[:-1], -1), halved(scales), None)


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """See :class:`kvjax.checkpoints.quantised_tensor.Method`; gpt-oss's experts are named as in float."""

    weight: str = ""

    def end_of(self, stored: Stored) -> str | None:
        """Bytes of one of the two names."""
        return next((end for end in _PACKED if stored.kind == "U8" and stored.name.endswith(end)), None)

    def idle(self, name: str) -> bool:
        """None is."""
        return False

    def join(self, origin: str, stem: str, parts: Mapping[str, Stored]) -> Mxfp4Experts:
        """The experts of a layer."""
        for end in _PACKED:
            if end not in parts:
                raise WeightsError(f"{origin} lacks {quoted(stem + end)}, a part of the weight {quoted(stem)}.")
        blocks, scales = (parts[end] for end in _PACKED)
        if len(blocks.shape) != 4 or blocks.shape[-1] != NUMBERS // 2 or blocks.shape[:-1] != scales.shape:
            raise WeightsError(
                f"{origin} is corrupt: blocks {list(blocks.shape)} and scales {list(scales.shape)} of {quoted(stem)} "
                f"do not fit; MXFP4 has {NUMBERS // 2} bytes and a scale for {NUMBERS} numbers."
            )
        return Mxfp4Experts(blocks, scales)
