"""The protocol of a weight file of any format: names, shapes and rows on request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import numpy as np

from kvjax.model.group_quantised import GroupFormat

#: How the numbers of a quantised tensor can be kept: in groups of its last axis, as int8 or float8_e4m3fn with a scale
#: for each of its outputs, or, where none of these holds them, rounded to int8.
Format = GroupFormat | Literal["int8", "fp8", "rounded"]


class Numbers(NamedTuple):
    """Rows of a tensor as it is quantised; see :class:`kvjax.model.group_quantised.GroupQuantised`.

    Attributes:
      whole: int8 [..., K]; of 4 bits from -8 to 7, of float8_e4m3fn the bits.
      scale, minimum: [..., K / G], in the dtype of the format; the second is None where there are none. Of "int8"
        and "fp8" one float32 scale a row.
    """

    whole: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None


class Checkpoint(Protocol):
    """Tensors by name, read in blocks of rows so that no copy of the model is ever made.

    Attributes:
      origin: the file or folder, for messages.
      shapes: shape of every tensor, slowest axis first ([out, in] for a linear layer).
      formats: of each tensor that is quantised how its own numbers can be kept.
    """

    origin: str

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def formats(self) -> Mapping[str, Format]: ...

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements ``start:stop`` of the first axis, as a fresh array of any float dtype; threads may call it."""
        ...

    def numbers(self, name: str, start: int, stop: int) -> Numbers:
        """Elements ``start:stop`` of the first axis of a tensor that can be kept, as they are stored."""
        ...

    def close(self) -> None:
        """Release the files."""
        ...
