"""Ways in which a checkpoint is wrong, one at a time, and the sentence that is then said."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import own_cases
from support import quantised_folders as quantised

from kvjax.checkpoints.load import load
from kvjax.errors import KvjaxError

NAN, INF = float("nan"), float("inf")
Edit = Callable[[Path], None]
OWN = {
    "chatglm": (own_cases.CHATGLM, own_cases.chatglm_shapes),
    "baichuan": (own_cases.ALIBI, own_cases.baichuan_shapes),
}


def config(**changes: Any) -> Edit:
    """Other values in config.json; None takes a key out."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        found = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))

    return edit


def file(name: str, content: bytes | str | dict | list | None) -> Edit:
    """Another content of a file; None removes it."""

    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            data = content if isinstance(content, (bytes, str)) else json.dumps(content)
            (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return edit


def weights(change: Callable[[dict[str, np.ndarray]], Any]) -> Edit:
    """Other tensors."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(
            {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors"
        )

    return edit


def without(part: str) -> Edit:
    return weights(lambda tensors: tensors.pop(next(name for name in tensors if part in name)))


def reshaped(part: str) -> Edit:
    def change(tensors):
        name = next(name for name in tensors if part in name and tensors[name].ndim == 2)
        tensors[name] = tensors[name].T

    return weights(change)


def packed(change: Callable[[dict[str, np.ndarray], str], Any]) -> Edit:
    """The first layer's gates in 4 bits, with a change."""
    name = "model.layers.0.mlp.experts.gate_up_proj"

    def edit(tensors: dict[str, np.ndarray]) -> None:
        experts, hidden, inner = tensors.pop(name).shape
        tensors[name + "_blocks"] = np.ones((experts, inner, hidden // 32, 16), np.uint8)
        tensors[name + "_scales"] = np.full((experts, inner, hidden // 32), 127, np.uint8)
        change(tensors, name)

    return weights(edit)


#: A projection that :func:`quantised_by` quantises, without an end.
Q_PROJ = "model.layers.0.self_attn.q_proj"


def quantised_by(kind: quantised.Kind, change: Callable[[dict[str, np.ndarray]], Any] = dict, **described: Any) -> Edit:
    """One projection quantised, with a change of its parts, named by their ends, and of what is said of it."""

    def edit(tensors: dict[str, np.ndarray]) -> None:
        parts, _ = kind.pack(tensors.pop(f"{Q_PROJ}.weight"))
        change(parts)
        tensors |= {Q_PROJ + end: part for end, part in parts.items()}

    def both(folder: Path) -> None:
        weights(edit)(folder)
        config(quantization_config=dict(kind.described) | described)(folder)

    return both


def part(end: str, value: Any) -> Callable[[dict[str, np.ndarray]], Any]:
    """Another part; None takes it away."""
    return lambda parts: parts.pop(end) if value is None else parts.update({end: value})


def last(end: str, value: Any) -> Callable[[dict[str, np.ndarray]], Any]:
    """Another last number of a part."""

    def change(parts: dict[str, np.ndarray]) -> None:
        parts[end] = parts[end].copy()
        parts[end].flat[-1] = value

    return change


GPTQ, AWQ, INT8, INT4, BLOCKS = (quantised.KINDS[name] for name in ("gptq", "awq", "int8", "int4", "fp8 in blocks"))


def reshape(tensors: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> None:
    tensors[name] = np.resize(tensors[name], shape)


def number(part: str, value: float, dtype: str = "float32") -> Edit:
    """A number that is none, in the last place of a tensor."""

    def change(tensors):
        name = next(name for name in tensors if part in name)
        tensors[name] = tensors[name].astype(np.dtype(dtype))
        tensors[name].flat[-1] = value

    return weights(change)


def extra(name: str) -> Edit:
    return weights(lambda tensors: tensors.update({name: np.ones((4, 4), np.float32)}))


def header(text: bytes, length: int | None = None) -> Edit:
    """A safetensors file of this header, with this as its length."""
    return file("model.safetensors", struct.pack("<Q", len(text) if length is None else length) + text + bytes(64))


def index(table: Any, whole: bool = False) -> Edit:
    return file("model.safetensors.index.json", table if whole else {"weight_map": table})


def sharded(table: dict[str, str]) -> Edit:
    """An index of the file that is there, with more in it."""

    def edit(folder: Path) -> None:
        index(dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors") | table)(folder)

    return edit


def tokenizer(change: Callable[[dict], Any]) -> Edit:
    def edit(folder: Path) -> None:
        found = json.loads((folder / "tokenizer.json").read_text())
        change(found)
        (folder / "tokenizer.json").write_text(json.dumps(found))

    return edit


def sentence_of(path: Path) -> str:
    with pytest.raises(KvjaxError) as caught:
        load(path, progress=False)
    said = str(caught.value)
    assert len(said) < 300 and not {"\n", "\0"} & set(said) and said.endswith("."), said
    return said


def named(listed):
    return [pytest.param(*item, id=f"{item[0]}-{number}") for number, item in enumerate(listed)]
