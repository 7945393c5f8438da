"""Reading one or many safetensors files as a checkpoint, with the ``safetensors`` library and NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.documents import NotADocument, parse_json
from kvjax.errors import WeightsError, quoted

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsFolder:
    """The weights of a Hugging Face folder: ``model.safetensors``, or the shards its index names.

    Files are opened anew for every read: a memory map that stays open counts every page it has touched, and a model
    would be in memory twice.

    Raises WeightsError when a file is missing, truncated or corrupt, when a tensor is in two shards, when the index
    and the shards disagree, or when a tensor is not of floats.
    """

    def __init__(self, folder: Path):
        self.origin = str(folder)
        self._where: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        index = read_json(folder / _INDEX) if (folder / _INDEX).is_file() else None
        if index is None and not (folder / _SINGLE).is_file():
            hint = " (there are PyTorch files: convert them with safetensors)" if any(folder.glob("*.bin")) else ""
            raise WeightsError(f"{folder} holds no weights: neither {_SINGLE} nor {_INDEX} is there{hint}.")
        table = index.get("weight_map") if index else None
        if index is not None and not (isinstance(table, dict) and all(isinstance(at, str) for at in table.values())):
            raise WeightsError(f"{folder / _INDEX} is corrupt: it has no weight_map from weights to files.")
        for file in sorted(set(table.values())) if table else (_SINGLE,):
            if Path(file).name != file or "\0" in file:
                raise WeightsError(
                    f"{folder / _INDEX} is corrupt: it names a file outside its folder ({quoted(file)})."
                )
            self._add(folder / file)
        for name, file in (table or {}).items():
            if name not in self._where or self._where[name].name != file:
                raise WeightsError(f"{folder / file} lacks the weight {quoted(name)}, which {_INDEX} says is there.")

    def _add(self, path: Path) -> None:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict, and not iterable
                if name in self._where:
                    files = f"{self._where[name].name} and {path.name}"
                    raise WeightsError(f"{path.parent} sets the weight {quoted(name)} twice: in {files}.")
                part = file.get_slice(name)
                kind = part.get_dtype()
                if kind not in _FLOATS:
                    raise WeightsError(f"{path} stores {quoted(name)} as {kind}; only {', '.join(_FLOATS)} are read.")
                self._where[name], self._shapes[name] = path, tuple(part.get_shape())

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return self._shapes

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements ``start:stop`` of the first axis of ``name``, in the dtype it is stored in."""
        with _open(self._where[name]) as file:
            return file.get_slice(name)[start:stop]

    def close(self) -> None:
        """Nothing stays open between reads."""


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise WeightsError(f"{path} is truncated or corrupt: {error}.") from error
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or 'no such file'}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; WeightsError when it is missing or is not one."""
    try:
        value = parse_json(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}.") from error
    except NotADocument as error:
        raise WeightsError(f"{path} is corrupt: it is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} is corrupt: it holds no JSON object.")
    return value
