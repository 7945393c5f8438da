"""Tensors as safetensors files have them, read by parts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.errors import WeightsError, quoted

#: Safetensors' names of the dtypes that numbers of a model have.
FLOATS = ("F64", "F32", "F16", "BF16")
#: Its name of float8_e4m3fn, which the library gives no array of NumPy for.
FP8 = "F8_E4M3"


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a file, whose header the library has checked.

    Attributes:
      path: the file. name: of the tensor there.
      kind: safetensors' name of its dtype.
      shape: its shape.
    """

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]

    def read(self, start: int | None = None, stop: int | None = None) -> np.ndarray:
        """Elements ``start:stop`` of the first axis, all by default, as a fresh array.

        Files are opened anew for every read: a memory map that stays open counts every page it has touched, and a model
        would be in memory twice.
        """
        if self.kind == FP8:
            return self._fp8(*slice(start, stop).indices(self.shape[0] if self.shape else 1)[:2])
        with opened(self.path) as file:
            return file.get_slice(self.name)[start:stop] if self.shape else file.get_tensor(self.name)

    def _fp8(self, start: int, stop: int) -> np.ndarray:
        row = int(np.prod(self.shape[1:]))
        try:
            with self.path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                at = json.loads(file.read(size))[self.name]["data_offsets"][0]
                file.seek(8 + size + at + start * row)
                raw = file.read((stop - start) * row)
        except OSError as error:
            raise WeightsError(f"{self.path} cannot be read: {error.strerror or 'no such file'}.") from error
        if len(raw) != (stop - start) * row:
            raise WeightsError(f"{self.path} became shorter while it was read: {quoted(self.name)} is not complete.")
        return np.frombuffer(raw, jnp.float8_e4m3fn).reshape((stop - start, *self.shape[1:]) if self.shape else ())


def opened(path: Path) -> Any:
    """A safetensors file, open; WeightsError where it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise WeightsError(f"{path} is truncated or corrupt: {error}.") from error
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or 'no such file'}.") from error
