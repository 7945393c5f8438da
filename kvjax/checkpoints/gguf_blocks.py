"""Blocks of quantised GGUF tensors as the whole numbers, scales and minima that they hold, nothing multiplied.

Formats: github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Numbers of 5 and 6 bits are kept in bytes. Scales of
the K formats are products of two numbers, at most 18 bits that float32 holds exactly. Other formats, whose numbers are
not evenly spaced or have 2 or 3 bits, are rounded to int8. Of MXFP4 a scale is stored halved, because a product's
numbers are twice float4's: a power of two, which bfloat16 holds exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvjax.checkpoints.checkpoint import Format
from kvjax.checkpoints.mxfp4 import MXFP4, halved, places
from kvjax.model.group_quantised import GroupFormat

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

#: Whole numbers, scales, and minima or None, of whole blocks of bytes.
Blocks = tuple[np.ndarray, np.ndarray, np.ndarray | None]

_FLOATS = ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")
_FORMATS = {
    "Q8_0": GroupFormat(8, 32, scale="float16"),
    "Q4_0": GroupFormat(4, 32, scale="float16"),
    "Q4_1": GroupFormat(4, 32, minimum=True, scale="float16"),
    "Q4_K": GroupFormat(4, 32, minimum=True, scale="float32"),
    "Q5_0": GroupFormat(8, 32, scale="float16"),
    "Q5_1": GroupFormat(8, 32, minimum=True, scale="float16"),
    "Q5_K": GroupFormat(8, 32, minimum=True, scale="float32"),
    "Q6_K": GroupFormat(8, 16, scale="float32"),
    "MXFP4": MXFP4,
}


def format_of(kind: GGMLQuantizationType) -> Format | None:
    """How the numbers of a tensor of this kind are kept; None for floats."""
    return _FORMATS.get(kind.name, None if kind.name in _FLOATS else "rounded")


def _halves(packed: np.ndarray) -> np.ndarray:
    """[blocks, n] bytes to [blocks, 2 n] numbers of 4 bits, from -8 to 7: low halves first, then high halves."""
    found = np.concatenate([packed & 15, packed >> 4], axis=1).view(np.int8)
    found -= 8
    return found


def _q8_0(raw: np.ndarray) -> Blocks:
    blocks = raw.view([("d", "<f2"), ("q", "i1", 32)])
    return blocks["q"], blocks["d"], None


def _q4_0(raw: np.ndarray) -> Blocks:
    blocks = raw.view([("d", "<f2"), ("q", "u1", 16)])
    return _halves(blocks["q"]), blocks["d"], None


def _q4_1(raw: np.ndarray) -> Blocks:
    blocks = raw.view([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])
    return _halves(blocks["q"]), blocks["d"], blocks["m"]


def _q4_k(raw: np.ndarray) -> Blocks:
    blocks = raw.view([("d", "<f2"), ("m", "<f2"), ("s", "u1", 12), ("q", "u1", (4, 32))])
    return _halves(blocks["q"].reshape(-1, 32)), *_scales(blocks)


def _q5_0(raw: np.ndarray) -> Blocks:
    blocks = raw.view([("d", "<f2"), ("h", "u1", 4), ("q", "u1", 16)])
    return _with_fifth(blocks["q"], blocks["h"]) - np.int8(16), blocks["d"], None


def _q5_1(raw: np.ndarray) -> Blocks:
    blocks = raw.view([("d", "<f2"), ("m", "<f2"), ("h", "u1", 4), ("q", "u1", 16)])
    return _with_fifth(blocks["q"], blocks["h"]), blocks["d"], blocks["m"]


def _q5_k(raw: np.ndarray) -> Blocks:
    blocks = raw.view([("d", "<f2"), ("m", "<f2"), ("s", "u1", 12), ("h", "u1", 32), ("q", "u1", (4, 1, 32))])
    # A byte of h has the fifth bit of its place in each of the 8 groups.
    fifth = (blocks["h"][:, None] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    whole = (blocks["q"] >> _NIBBLES & 15).reshape(-1, 8, 32) | fifth << 4
    return whole.view(np.int8), *_scales(blocks)


def _q6_k(raw: np.ndarray) -> Blocks:
    blocks = raw.view([("q", "u1", (2, 1, 64)), ("h", "u1", (2, 1, 32)), ("s", "i1", 16), ("d", "<f2")])
    high = blocks["h"] >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    whole = (blocks["q"] >> _NIBBLES & 15).reshape(-1, 2, 4, 32) | high << 4
    return whole.view(np.int8) - np.int8(32), blocks["d"].astype(np.float32)[:, None] * blocks["s"], None


def _mxfp4(raw: np.ndarray) -> Blocks:
    blocks = raw.view([("e", "u1"), ("q", "u1", 16)])
    codes = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1)
    return places(codes), halved(blocks["e"]), None


#: Shifts of a byte's low and high half.
_NIBBLES = np.array([[0], [4]], np.uint8)


def _with_fifth(packed: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """[blocks, 32] numbers from 0 to 31 of bytes [blocks, 16], low halves first, and of fifth bits [blocks, 4]."""
    halves = np.concatenate([packed & 15, packed >> 4], axis=1)
    return (halves | np.unpackbits(bits, axis=1, bitorder="little") << 4).view(np.int8)


def _scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima [blocks, 8], of which 12 bytes have 6 bits each."""
    low, mid, high = (blocks["s"][:, start : start + 4] for start in (0, 4, 8))
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minimum = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=1)
    factor, least = (blocks[name].astype(np.float32)[:, None] for name in "dm")
    return factor * scale, -(least * minimum)


#: What reads the blocks of each format that is kept in groups, given bytes of one axis.
NUMBERS: dict[str, Callable[[np.ndarray], Blocks]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
