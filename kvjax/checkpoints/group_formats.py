"""The least format of groups that holds the numbers of several, and numbers of one format in another, unrounded.

A matrix of a decoder may be several tensors of a file (queries, keys and values; a gate and what it gates), which the
tools that write GGUF quantise each as they see fit: queries as Q4_K, say, and values as Q6_K.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from kvjax.checkpoints.checkpoint import Numbers
from kvjax.model.group_quantised import GroupFormat
from pallas_kernels.quantised_matmul import weight_tiles


def common_format(formats: Collection[GroupFormat]) -> GroupFormat | None:
    """The least format that holds the numbers of all of these; None where float8 ones and others have to be together.

    Whole numbers of 4 bits fit into those of 8, groups are parts of groups, and what has no minima has zeros, or, where
    minima count from the least number of 4 bits, as many steps below it.
    """
    first, *others = formats
    if not others:
        return first
    if any(form.fp8 for form in formats) and not all(form.fp8 for form in formats):
        return None
    bits, minimum = max(form.bits for form in formats), any(form.minimum for form in formats)
    fp4 = all(form.fp4 for form in formats)
    if bits == 4 and not fp4 and any(form.fp4 for form in formats):
        bits = 8  # they are whole numbers from -12 to 12
    scales = {form.scale for form in formats}
    # Eight steps of float16 may be beyond it.
    exact = len(scales) == 1 and (bits == 8 or minimum == all(form.minimum for form in formats))
    scale = scales.pop() if exact else "float32"
    return GroupFormat(bits, math.gcd(*(form.group for form in formats)), minimum, scale, first.fp8, fp4)


def as_format(numbers: Numbers, own: GroupFormat, wanted: GroupFormat) -> Numbers:
    """Numbers of one format in another that holds them, see :func:`common_format`."""
    if own == wanted:
        return numbers
    whole, times = numbers.whole, own.group // wanted.group
    kind: Any = None if own.scale == wanted.scale else np.float32  # see common_format
    scale, minimum = (None if x is None else np.repeat(x, times, axis=-1).astype(kind or x.dtype) for x in numbers[1:])
    assert scale is not None
    if own.bits < wanted.bits:
        whole = (
            weight_tiles.fp4_numbers(whole) if own.fp4 else whole + np.int8(weight_tiles.OFFSET if own.minimum else 0)
        )
    if wanted.minimum and minimum is None:
        minimum = -weight_tiles.OFFSET * scale if wanted.bits == 4 else np.zeros_like(scale)
    return Numbers(whole, scale, minimum)
