"""GPTQ's safetensors, as AutoGPTQ and GPTQModel write them: words of 32 bits along the inputs (arXiv 2210.17323).

``qweight`` [K / 8, N] has 8 numbers of 4 bits that follow each other along the inputs, the lowest bits first,
``scales`` [G, N] a scale for each group and output, ``qzeros`` [G, N / 8] zero points along the outputs, and ``g_idx``
[K] the group of each input. Files of the first version hold zero points less 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from kvjax.checkpoints.quantised_tensor import (
    QuantisedMatrix,
    StoredInParts,
    check_matrix,
    check_parts,
    check_shape,
    groups_of,
    order_of,
    signed,
    unpacked,
    words,
)
from kvjax.checkpoints.stored import Stored
from kvjax.errors import WeightsError, quoted

#: What safetensors call words, and floats that are scales.
WORDS, SCALES = ("I32", "U32"), ("F16", "BF16", "F32")
_ENDS = (".qweight", ".qzeros", ".scales", ".g_idx")


@dataclasses.dataclass(frozen=True)
class Gptq(StoredInParts):
    """See :class:`kvjax.checkpoints.quantised_tensor.Method`.

    Attributes:
      bits: of a number, 4 or 8.
      group: inputs that share a scale; None for all.
      less: what zero points are stored less.
      ordered: whether groups were made in another order than the inputs'.
    """

    bits: int
    group: int | None
    less: int
    ordered: bool
    ends: ClassVar[tuple[str, ...]] = _ENDS

    def join(self, origin: str, stem: str, parts: Mapping[str, Stored]) -> QuantisedMatrix:
        """The matrix of some linear layer."""
        check_parts(origin, stem, parts, {".qweight": WORDS, ".qzeros": WORDS, ".scales": SCALES})
        weight, zeros, scales = (parts[end] for end in _ENDS[:3])
        check_matrix(origin, weight)
        inputs, outputs = weight.shape[0] * 32 // self.bits, weight.shape[1]
        group, groups = groups_of(inputs, self.group)
        asking = f"{outputs} outputs and groups of {group} of {inputs} inputs"
        check_shape(origin, scales, (groups, outputs), asking=asking)
        check_shape(origin, zeros, (groups, words(outputs, self.bits)), asking=asking)
        if self.ordered and ".g_idx" not in parts:
            raise WeightsError(f"{origin} says that groups have another order, and lacks {quoted(stem + '.g_idx')}.")
        group_of = order_of(origin, parts.get(".g_idx"), inputs, group)
        bits, recent, less = self.bits, self.recent, self.less

        def whole(start: int, stop: int) -> np.ndarray:
            return signed(unpacked(recent.read(stem, weight)[:, start:stop].T, bits), bits)

        def zero(start: int, stop: int) -> np.ndarray:
            found = unpacked(recent.read(stem, zeros), bits)[:, start:stop]
            # What was stored less 1 wraps around at 0.
            return signed((found + np.uint8(less)) & np.uint8(2**bits - 1), bits).T

        def scale(start: int, stop: int) -> np.ndarray:
            return recent.read(stem, scales)[:, start:stop].T

        return QuantisedMatrix((outputs, inputs), bits, group, whole, scale, zero, group_of)
