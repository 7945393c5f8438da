"""compressed-tensors' whole numbers: int8 as they are, or words of 32 bits along the inputs.

``weight`` [N, K] int8, or ``weight_packed`` [N, K / 8] of 4 bits (of 8 bits [N, K / 4]), the lowest bits first, counted
from the least number; ``weight_scale`` [N, G], or for all outputs; ``weight_zero_point`` where numbers are not around
0, packed along the outputs where weights are packed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from kvjax.checkpoints.methods.fp8 import IDLE
from kvjax.checkpoints.methods.gptq import SCALES, WORDS
from kvjax.checkpoints.quantised_tensor import (
    QuantisedMatrix,
    Rows,
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

_ENDS = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")


@dataclasses.dataclass(frozen=True)
class Compressed(StoredInParts):
    """See :class:`kvjax.checkpoints.quantised_tensor.Method`.

    Attributes:
      bits: of a number, 4 or 8.
      group: inputs that share a scale; None for all.
      packed: whether numbers are in words.
      symmetric: whether zero points may be absent.
    """

    bits: int
    group: int | None
    packed: bool
    symmetric: bool
    ends: ClassVar[tuple[str, ...]] = _ENDS

    def end_of(self, stored: Stored) -> str | None:
        """A weight of int8, or one of its own ends."""
        if stored.kind == "I8" and stored.name.endswith(".weight"):
            return ".weight"
        return super().end_of(stored)

    def idle(self, name: str) -> bool:
        """Scales and zero points of activations and caches."""
        return name.endswith((*IDLE, ".input_zero_point", ".output_zero_point", ".k_zero_point", ".v_zero_point"))

    def join(self, origin: str, stem: str, parts: Mapping[str, Stored]) -> QuantisedMatrix:
        """The matrix of some linear layer."""
        end, kinds = (".weight_packed", WORDS) if self.packed else (".weight", ("I8",))
        zeros = {} if self.symmetric else {".weight_zero_point": (*WORDS, "I8")}
        check_parts(origin, stem, parts, {end: kinds, ".weight_scale": SCALES, **zeros})
        weight, scales = parts[end], parts[".weight_scale"]
        check_matrix(origin, weight)
        outputs, inputs = self._shape(origin, weight, parts.get(".weight_shape"))
        group, groups = groups_of(inputs, self.group)
        allowed = [(outputs, groups)]
        if groups == 1:
            allowed += [(outputs,), (1, 1), (1,), ()]
        check_shape(origin, scales, *allowed, asking=f"{outputs} outputs and groups of {group} of {inputs} inputs")
        zero = self._zero(origin, stem, parts.get(".weight_zero_point"), scales, outputs, groups)
        bits, order = self.bits, order_of(origin, parts.get(".weight_g_idx"), inputs, group)

        def whole(start: int, stop: int) -> np.ndarray:
            held = weight.read(start, stop)
            return signed(unpacked(held, bits)[:, :inputs], bits) if self.packed else held

        return QuantisedMatrix((outputs, inputs), bits, group, whole, _by_output(scales, outputs), zero, order)

    def _shape(self, origin: str, weight: Stored, stored: Stored | None) -> tuple[int, int]:
        """[N, K], which words may have more than."""
        if not self.packed:
            return weight.shape[0], weight.shape[1]
        inputs = weight.shape[1] * 32 // self.bits
        if stored is None:
            return weight.shape[0], inputs
        check_shape(origin, stored, (2,), asking="its two axes")
        outputs, own = map(int, stored.read())
        if outputs != weight.shape[0] or own < 1 or words(own, self.bits) != weight.shape[1]:
            raise WeightsError(
                f"{origin} is corrupt: {quoted(stored.name)} says [{outputs:,}, {own:,}], and {quoted(weight.name)} "
                f"holds [{weight.shape[0]:,}, {inputs:,}] numbers."
            )
        return outputs, own

    def _zero(
        self, origin: str, stem: str, zeros: Stored | None, scales: Stored, outputs: int, groups: int
    ) -> Rows | None:
        """Zero points by output: as scales are stored, or in words along the outputs."""
        if zeros is None:
            return None
        if zeros.kind not in WORDS:
            check_shape(origin, zeros, scales.shape, asking="its scales")
            return _by_output(zeros, outputs)
        check_shape(origin, zeros, (words(outputs, self.bits), groups), asking=f"{outputs} outputs")
        bits, recent = self.bits, self.recent

        def zero(start: int, stop: int) -> np.ndarray:
            return signed(unpacked(recent.read(stem, zeros).T, bits).T[start:stop], bits)

        return zero


def _by_output(part: Stored, outputs: int) -> Rows:
    """Rows of what each output has, or all have in common, as a matrix."""
    if int(np.prod(part.shape)) == 1:
        return lambda start, stop: np.broadcast_to(part.read().reshape(1, 1), (stop - start, 1))
    return lambda start, stop: part.read(start, stop).reshape(stop - start, -1)
