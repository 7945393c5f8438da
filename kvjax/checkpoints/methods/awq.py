"""AWQ's safetensors (arXiv 2306.00978), as AutoAWQ's "gemm" form has them: words of 32 bits along the outputs.

``qweight`` [K, N / 8] has 8 numbers of 4 bits of outputs that follow each other, in an order of their own, ``qzeros``
[G, N / 8] zero points in the same one, ``scales`` [G, N] a scale for each group and output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from kvjax.checkpoints.methods.gptq import SCALES, WORDS
from kvjax.checkpoints.quantised_tensor import (
    QuantisedMatrix,
    StoredInParts,
    check_matrix,
    check_parts,
    check_shape,
    groups_of,
    signed,
    unpacked,
)
from kvjax.checkpoints.stored import Stored

_ENDS = (".qweight", ".qzeros", ".scales")
#: Where in a word, counted from the lowest bits, each of its 8 outputs is.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclasses.dataclass(frozen=True)
class Awq(StoredInParts):
    """See :class:`kvjax.checkpoints.quantised_tensor.Method`.

    Attributes:
      group: inputs that share a scale; None for all.
    """

    group: int | None
    ends: ClassVar[tuple[str, ...]] = _ENDS

    def join(self, origin: str, stem: str, parts: Mapping[str, Stored]) -> QuantisedMatrix:
        """The matrix of some linear layer."""
        check_parts(origin, stem, parts, {".qweight": WORDS, ".qzeros": WORDS, ".scales": SCALES})
        weight, zeros, scales = (parts[end] for end in _ENDS)
        check_matrix(origin, weight)
        inputs, outputs = weight.shape[0], weight.shape[1] * 8
        group, groups = groups_of(inputs, self.group)
        asking = f"{outputs} outputs and groups of {group} of {inputs} inputs"
        check_shape(origin, scales, (groups, outputs), asking=asking)
        check_shape(origin, zeros, (groups, outputs // 8), asking=asking)
        recent = self.recent

        def columns(part: Stored, start: int, stop: int) -> np.ndarray:
            """[stop - start, rows] of a part that is packed along outputs."""
            first = start // 8
            held = recent.read(stem, part)[:, first : -(-stop // 8)]
            numbers = unpacked(held, 4).reshape(len(held), -1, 8)[..., _PLACES].reshape(len(held), -1)
            return signed(numbers[:, start - 8 * first : stop - 8 * first].T, 4)

        return QuantisedMatrix(
            (outputs, inputs),
            4,
            group,
            lambda start, stop: columns(weight, start, stop),
            lambda start, stop: recent.read(stem, scales)[:, start:stop].T,
            lambda start, stop: columns(zeros, start, stop),
        )
