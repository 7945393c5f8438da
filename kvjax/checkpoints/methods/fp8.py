"""Matrices of float8_e4m3fn with a scale for all, for each output, or for each block of outputs and inputs.

As DeepSeek and Qwen publish theirs (``weight_scale_inv``, blocks of 128 x 128: arXiv 2412.19437, section 3.3), and as
AutoFP8, FBGEMM and compressed-tensors write theirs (``weight_scale``). A number is its float times its scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvjax.checkpoints.checkpoint import Format, Numbers
from kvjax.checkpoints.methods.gptq import SCALES
from kvjax.checkpoints.quantised_tensor import check_matrix, check_parts, check_shape, largest_group
from kvjax.checkpoints.stored import FP8, Stored
from kvjax.model.group_quantised import GroupFormat

#: What is there for fp8 activations and caches, which kvjax quantises in its own ways.
IDLE = (
    ".input_scale",
    ".activation_scale",
    ".output_scale",
    ".input_scale_ub",
    ".kv_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Fp8Matrix:
    """A matrix [N, K] of float8_e4m3fn.

    Attributes:
      values: the matrix. scales: of it, as they are stored.
      block: outputs and inputs that share a scale.
    """

    values: Stored
    scales: Stored
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]."""
        return self.values.shape

    @property
    def format(self) -> Format:
        """A scale an output, or groups of the inputs of a block."""
        inputs = self.shape[1]
        if self.block[1] >= inputs:
            return "fp8"
        group = largest_group(self.block[1])
        if group is None or inputs % self.block[1]:
            return "rounded"
        return GroupFormat(8, group, scale="float32", fp8=True)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows as float32."""
        by_row = self._scales(start, stop)
        if by_row.shape[1] > 1:
            by_row = np.repeat(by_row, self.block[1], axis=1)[:, : self.shape[1]]
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is said by the loader
            return self.values.read(start, stop).astype(np.float32) * by_row

    def numbers(self, start: int, stop: int) -> Numbers:
        """Rows as they are stored; scales are no numbers where a number is none."""
        form, scale, values = self.format, self._scales(start, stop), self.values.read(start, stop)
        if ((values.view(np.uint8) & 0x7F) == 0x7F).any():  # which is no number
            scale = np.full_like(scale, np.nan)
        times = self.block[1] // form.group if isinstance(form, GroupFormat) else 1
        return Numbers(values.view(np.int8), np.repeat(scale, times, axis=1), None)

    def _scales(self, start: int, stop: int) -> np.ndarray:
        """float32 [n, blocks of inputs] of rows."""
        outputs = self.block[0]
        first, last = start // outputs, -(-stop // outputs)
        scale = self.scales.read(first, last) if self.scales.shape else self.scales.read()
        found = scale.astype(np.float32).reshape(last - first, -1)
        return found[np.arange(start, stop) // outputs - first]


@dataclasses.dataclass(frozen=True)
class Fp8:
    """See :class:`kvjax.checkpoints.quantised_tensor.Method`.

    Attributes:
      block: outputs and inputs that share a scale; None where an output has one, or all of them.
    """

    block: tuple[int, int] | None = None
    weight: str = ".weight"

    def end_of(self, stored: Stored) -> str | None:
        """A weight of its dtype, or a scale."""
        if stored.kind == FP8 and stored.name.endswith(".weight"):
            return ".weight"
        return next((end for end in (".weight_scale_inv", ".weight_scale") if stored.name.endswith(end)), None)

    def idle(self, name: str) -> bool:
        """Scales of activations and caches."""
        return name.endswith(IDLE)

    def join(self, origin: str, stem: str, parts: Mapping[str, Stored]) -> Fp8Matrix:
        """The matrix of some linear layer."""
        end = ".weight_scale_inv" if ".weight_scale_inv" in parts else ".weight_scale"
        check_parts(origin, stem, parts, {".weight": (FP8,), end: SCALES})
        weight, scales = parts[".weight"], parts[end]
        check_matrix(origin, weight)
        outputs, inputs = weight.shape
        if self.block is not None:
            grid = -(-outputs // self.block[0]), -(-inputs // self.block[1])
            check_shape(origin, scales, grid, asking=f"blocks of {self.block[0]} x {self.block[1]}")
            return Fp8Matrix(weight, scales, self.block)
        check_shape(origin, scales, (outputs, 1), (outputs,), (1, 1), (1,), (), asking=f"{outputs} outputs")
        all_share = int(np.prod(scales.shape)) == 1
        return Fp8Matrix(weight, scales, (outputs if all_share else 1, inputs))
