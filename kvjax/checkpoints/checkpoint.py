"""The protocol of a weight file of any format: names, shapes and rows on request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np


class Checkpoint(Protocol):
    """Tensors by name, read in blocks of rows so that no copy of the model is ever made.

    Attributes:
      origin: the file or folder, for messages.
      shapes: shape of every tensor, slowest axis first ([out, in] for a linear layer).
    """

    origin: str

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements ``start:stop`` of the first axis, as a fresh array of any float dtype; threads may call it."""
        ...

    def close(self) -> None:
        """Release the files."""
        ...
