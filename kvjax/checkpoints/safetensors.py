"""Reading one or many safetensors files as a checkpoint, with the ``safetensors`` library and NumPy only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.checkpoints.checkpoint import Format, Numbers
from kvjax.checkpoints.mxfp4 import Mxfp4
from kvjax.checkpoints.quantised_tensor import Method, Tensor
from kvjax.checkpoints.stored import FLOATS, Stored, opened
from kvjax.documents import NotADocument, parse_json
from kvjax.errors import WeightsError, quoted

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def holds_weights(folder: Path) -> bool:
    """Whether a folder has safetensors."""
    return (folder / _INDEX).is_file() or (folder / _SINGLE).is_file()


class SafetensorsFolder:
    """The weights of a Hugging Face folder: ``model.safetensors``, or the shards its index names.

    What is quantised is read as the tensors that the same model has in float: by MXFP4, which its names tell, or by
    another method.

    Raises WeightsError when a file is missing, truncated or corrupt, when a tensor is in two shards, when the index
    and the shards disagree, when parts of a quantised tensor do not fit, or when a tensor is neither of floats nor
    quantised by a method that there is.
    """

    def __init__(self, folder: Path, method: Method | None = None):
        self.origin = str(folder)
        self._stored: dict[str, Stored] = {}
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
            if name not in self._stored or self._stored[name].path.name != file:
                raise WeightsError(f"{folder / file} lacks the weight {quoted(name)}, which {_INDEX} says is there.")
        self._tensors: dict[str, Stored | Tensor] = {}
        self._join([Mxfp4(), *([] if method is None else [method])])

    def _add(self, path: Path) -> None:
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict, and not iterable
                if name in self._stored:
                    files = f"{self._stored[name].path.name} and {path.name}"
                    raise WeightsError(f"{path.parent} sets the weight {quoted(name)} twice: in {files}.")
                part = file.get_slice(name)
                self._stored[name] = Stored(path, name, part.get_dtype(), tuple(part.get_shape()))

    def _join(self, methods: list[Method]) -> None:
        """Put tensors in the places of what stands for them."""
        left = dict(self._stored)
        for method in methods:
            parts: dict[str, dict[str, Stored]] = defaultdict(dict)
            for name, stored in list(left.items()):
                end = method.end_of(stored)
                if end is not None:
                    parts[name.removesuffix(end)][end] = left.pop(name)
                elif method.idle(name):
                    del left[name]
            for stem in sorted(parts):
                name = stem + method.weight
                if name in left:
                    raise WeightsError(f"{self.origin} holds {quoted(name)} twice: in float and quantised.")
                self._tensors[name] = method.join(self.origin, stem, parts[stem])
        for name, stored in left.items():
            if stored.kind not in FLOATS:
                raise WeightsError(
                    f"{stored.path} stores {quoted(name)} as {stored.kind}; only {', '.join(FLOATS)} are read."
                )
            self._tensors[name] = stored

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    @property
    def formats(self) -> Mapping[str, Format]:
        """The format of each quantised tensor, by its name."""
        return {name: tensor.format for name, tensor in self._tensors.items() if not isinstance(tensor, Stored)}

    def numbers(self, name: str, start: int, stop: int) -> Numbers:
        """Elements ``start:stop`` of the first axis of ``name``, of a format that keeps them, as they are stored."""
        tensor = self._tensors[name]
        assert not isinstance(tensor, Stored)
        return tensor.numbers(start, stop)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements ``start:stop`` of the first axis of ``name``, in the dtype it is stored in, or in float32."""
        return self._tensors[name].read(start, stop)

    def close(self) -> None:
        """Nothing stays open between reads."""


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
