"""Reading one or many safetensors files as a checkpoint, with the ``safetensors`` library and NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.checkpoints.checkpoint import Numbers
from kvjax.checkpoints.mxfp4 import NUMBERS, PACKED, dequantized
from kvjax.documents import NotADocument, parse_json
from kvjax.errors import WeightsError, quoted

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsFolder:
    """The weights of a Hugging Face folder: ``model.safetensors``, or the shards its index names.

    Experts that are quantised as MXFP4, "NAME_blocks" and "NAME_scales", are read as the tensor NAME that the same
    model has in float: [E, M, N] of blocks [E, N, M / 32, 16] and scales [E, N, M / 32].

    Files are opened anew for every read: a memory map that stays open counts every page it has touched, and a model
    would be in memory twice.

    Raises WeightsError when a file is missing, truncated or corrupt, when a tensor is in two shards, when the index
    and the shards disagree, or when a tensor is neither of floats nor of MXFP4.
    """

    def __init__(self, folder: Path):
        self.origin = str(folder)
        self._where: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._bytes: dict[str, tuple[int, ...]] = {}
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
        self._join_packed()

    def _add(self, path: Path) -> None:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict, and not iterable
                if name in self._where:
                    files = f"{self._where[name].name} and {path.name}"
                    raise WeightsError(f"{path.parent} sets the weight {quoted(name)} twice: in {files}.")
                part = file.get_slice(name)
                kind = part.get_dtype()
                packed = kind == "U8" and name.endswith(PACKED)
                if kind not in _FLOATS and not packed:
                    raise WeightsError(f"{path} stores {quoted(name)} as {kind}; only {', '.join(_FLOATS)} are read.")
                self._where[name] = path
                (self._bytes if packed else self._shapes)[name] = tuple(part.get_shape())

    def _join_packed(self) -> None:
        """Put tensors in the places of their blocks and scales."""
        blocks, scales = PACKED
        for name in sorted({part.removesuffix(blocks).removesuffix(scales) for part in self._bytes}):
            for part in PACKED:
                if name + part not in self._bytes:
                    raise WeightsError(
                        f"{self.origin} lacks {quoted(name + part)}, a part of the weight {quoted(name)}."
                    )
            held, scaled = (self._bytes[name + part] for part in PACKED)
            if len(held) != 4 or held[-1] != NUMBERS // 2 or held[:-1] != scaled:
                raise WeightsError(
                    f"{self.origin} is corrupt: blocks {list(held)} and scales {list(scaled)} of {quoted(name)} do not "
                    f"fit; MXFP4 has {NUMBERS // 2} bytes and a scale for {NUMBERS} numbers."
                )
            if name in self._shapes:
                raise WeightsError(f"{self.origin} holds {quoted(name)} twice: in float and as blocks and scales.")
            self._shapes[name] = held[0], held[2] * NUMBERS, held[1]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return self._shapes

    @property
    def formats(self) -> Mapping[str, Any]:
        """Of each quantised tensor how its numbers are kept: MXFP4 is rounded to int8, other tensors are floats."""
        return {name: "int8" for name in self._shapes if name not in self._where}

    def numbers(self, name: str, start: int, stop: int) -> Numbers:
        """No tensor's numbers are kept as they are."""
        raise NotImplementedError

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements ``start:stop`` of the first axis of ``name``, in the dtype it is stored in, or in float32."""
        if name not in self._where:
            blocks, scales = (self._stored(name + part, start, stop) for part in PACKED)
            return dequantized(blocks, scales).swapaxes(1, 2)
        return self._stored(name, start, stop)

    def _stored(self, name: str, start: int, stop: int) -> np.ndarray:
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
