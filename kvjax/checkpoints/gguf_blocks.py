"""Blocks of quantised GGUF tensors as the whole numbers, scales and minima that they hold, nothing multiplied.

Formats: github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Q4_K's scales are products of two numbers, 17 bits that
float32 holds exactly. Other formats would take more than a byte a number so, and are rounded to int8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

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
}


def format_of(kind: GGMLQuantizationType) -> GroupFormat | Literal["int8"] | None:
    """How the numbers of a tensor of this kind are kept; None for floats."""
    return _FORMATS.get(kind.name, None if kind.name in _FLOATS else "int8")


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
    low, mid, high = (blocks["s"][:, start : start + 4] for start in (0, 4, 8))
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minimum = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=1)
    whole = _halves(blocks["q"].reshape(-1, 32))
    scales = blocks["d"].astype(np.float32)[:, None] * scale
    return whole, scales, -(blocks["m"].astype(np.float32)[:, None] * minimum)


#: What reads the blocks of each format that is kept in groups, given bytes of one axis.
NUMBERS: dict[str, Callable[[np.ndarray], Blocks]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
