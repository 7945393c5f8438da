"""Packs matrices as Hugging Face checkpoints that are quantised hold them, word by word from what the formats say.

Each packer takes a float matrix [N, K] and returns the tensors in its place, by the ends of their names, and the floats
that they stand for.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

Packed = tuple[dict[str, np.ndarray], np.ndarray]
#: In AutoAWQ's words, the output that each 4 bits hold, from the lowest on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def whole_numbers(
    matrix: np.ndarray, bits: int, group: int, symmetric: bool, dtype: Any = np.float16
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers from 0 on [N, K], scales and zero points [N, K / group] of a matrix."""
    most = 2**bits - 1
    grouped = matrix.reshape(len(matrix), -1, group)
    low, high = grouped.min(-1), grouped.max(-1)
    if symmetric:
        scale = (np.abs(grouped).max(-1) / (most // 2)).astype(dtype)
        zero = np.full(scale.shape, (most + 1) // 2)
    else:
        scale = ((np.maximum(high, 0) - np.minimum(low, 0)) / most).astype(dtype)
        zero = np.clip(np.rint(-np.minimum(low, 0) / scale.astype(np.float64)), 0, most).astype(np.int64)
    found = np.rint(grouped / scale.astype(np.float64)[..., None]) + zero[..., None]
    return np.clip(found, 0, most).astype(np.int64).reshape(matrix.shape), scale, zero


def floats_of(q: np.ndarray, scale: np.ndarray, zero: np.ndarray, group: int) -> np.ndarray:
    scale, zero = (np.repeat(x.astype(np.float64), group, axis=1) for x in (scale, zero))
    return ((q - zero) * scale).astype(np.float32)


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """int32 words along the last axis, the first number in the lowest bits."""
    each = 32 // bits
    numbers = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % each)])
    parts = numbers.reshape(*numbers.shape[:-1], -1, each).astype(np.uint64)
    found = np.zeros(parts.shape[:-1], np.uint64)
    for place in range(each):
        found |= parts[..., place] << np.uint64(bits * place)
    return found.astype(np.uint32).view(np.int32)


def gptq(
    matrix: np.ndarray, *, bits: int = 4, group: int = 32, symmetric: bool = True, v2: bool = False, order: bool = False
) -> Packed:
    group = matrix.shape[1] if group == -1 else group
    inputs = matrix.shape[1]
    index = np.arange(inputs) // group
    if order:  # what is quantised is in another order than what is stored
        index = np.random.default_rng(inputs).permutation(index)
    by_group = np.argsort(index, kind="stable")
    q, scale, zero = whole_numbers(matrix[:, by_group], bits, group, symmetric)
    back = np.argsort(by_group)
    floats = floats_of(q, scale, zero, group)[:, back]
    stored = zero if v2 else zero - 1 & 2**bits - 1
    tensors = {
        ".qweight": words(q[:, back], bits).T,
        ".qzeros": words(stored.T, bits),
        ".scales": scale.T,
        ".g_idx": index.astype(np.int32),
    }
    return tensors, floats


def awq(matrix: np.ndarray, *, group: int = 32) -> Packed:
    q, scale, zero = whole_numbers(matrix, 4, group, False)

    def packed(numbers: np.ndarray) -> np.ndarray:
        """[rows, N / 8] of [N, rows]."""
        by_word = numbers.T.reshape(numbers.shape[1], -1, 8)
        return words(by_word[..., AWQ_ORDER].reshape(numbers.shape[1], -1), 4)

    floats = floats_of(q, scale, zero, group)
    return {".qweight": packed(q), ".qzeros": packed(zero), ".scales": scale.T}, floats


def compressed_int8(matrix: np.ndarray, *, symmetric: bool = True, tensor: bool = False) -> Packed:
    flat = matrix.reshape(1, -1) if tensor else matrix
    q, scale, zero = whole_numbers(flat, 8, flat.shape[1], symmetric, jnp.bfloat16)
    floats = floats_of(q, scale, zero, flat.shape[1]).reshape(matrix.shape)
    tensors = {".weight": (q - 128).astype(np.int8).reshape(matrix.shape), ".weight_scale": scale}
    if tensor:
        tensors[".weight_scale"] = scale.reshape(1)
    if not symmetric:
        tensors[".weight_zero_point"] = (zero - 128).astype(np.int8)
    return tensors, floats


def compressed_int4(matrix: np.ndarray, *, bits: int = 4, group: int = 32, symmetric: bool = True) -> Packed:
    q, scale, zero = whole_numbers(matrix, bits, group, symmetric, jnp.bfloat16)
    tensors = {
        ".weight_packed": words(q, bits),
        ".weight_scale": scale,
        ".weight_shape": np.array(matrix.shape, np.int64),
    }
    if not symmetric:
        tensors[".weight_zero_point"] = words(zero.T, bits).T
    return tensors, floats_of(q, scale, zero, group)


def fp8(matrix: np.ndarray, *, block: tuple[int, int] | None = None, tensor: bool = False, end: str = "") -> Packed:
    """Blocks of outputs and inputs; without, outputs, or all of them, share a scale."""
    outputs, inputs = matrix.shape
    rows, columns = block or ((outputs if tensor else 1), inputs)
    grid = -(-outputs // rows), -(-inputs // columns)
    scale, values = np.empty(grid, np.float32), np.empty(matrix.shape, jnp.float8_e4m3fn)
    floats = np.empty(matrix.shape, np.float32)
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = np.abs(matrix[at]).max() / 448
            values[at] = (matrix[at] / scale[i, j]).astype(jnp.float8_e4m3fn)
            floats[at] = values[at].astype(np.float32) * scale[i, j]
    end = end or (".weight_scale_inv" if block else ".weight_scale")
    return {".weight": values, end: scale.reshape(1) if tensor else scale}, floats


def _scheme(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """A description of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": _scheme(**weights),
        "ignore": ["lm_head"],
    }


def gptq_config(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False} | more


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to quantise a checkpoint.

    Attributes:
      described: what its config.json has as quantization_config.
      pack: the packer of a matrix.
      kept: how its numbers are stored with weights="file": bits and size of groups and whether there are minima, or
        "int8" or "fp8" with a scale an output; None where they are rounded.
    """

    described: Mapping[str, Any]
    pack: Callable[[np.ndarray], Packed]
    kept: tuple[int, int, bool] | str | None


def _part(pack: Callable[..., Packed], **options: Any) -> Callable[[np.ndarray], Packed]:
    return lambda matrix: pack(matrix, **options)


KINDS: dict[str, Kind] = {
    "gptq": Kind(gptq_config(), gptq, (4, 32, False)),
    "gptq, zero points": Kind(gptq_config(sym=False), _part(gptq, symmetric=False), (4, 32, True)),
    "gptq v2, zero points": Kind(
        gptq_config(sym=False, checkpoint_format="gptq_v2"), _part(gptq, symmetric=False, v2=True), (4, 32, True)
    ),
    "gptq, 8 bits": Kind(gptq_config(bits=8), _part(gptq, bits=8), (8, 32, False)),
    "gptq, 8 bits, zero points": Kind(
        gptq_config(bits=8, group_size=-1, sym=False), _part(gptq, bits=8, group=-1, symmetric=False), (8, 32, True)
    ),
    "gptq, groups of all inputs": Kind(gptq_config(group_size=-1), _part(gptq, group=-1), (4, 32, False)),
    "gptq, in another order": Kind(gptq_config(desc_act=True), _part(gptq, order=True), None),
    "awq": Kind(AWQ, awq, (4, 32, True)),
    "int8": Kind(
        compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"), compressed_int8, "int8"
    ),
    "int8, a scale for all": Kind(
        compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="tensor"),
        _part(compressed_int8, tensor=True),
        "int8",
    ),
    "int8, zero points": Kind(
        compressed("int-quantized", num_bits=8, type="int", symmetric=False, strategy="channel"),
        _part(compressed_int8, symmetric=False),
        (8, 32, True),
    ),
    "int4": Kind(
        compressed("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32),
        compressed_int4,
        (4, 32, False),
    ),
    "int4, zero points": Kind(
        compressed("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=32),
        _part(compressed_int4, symmetric=False),
        (4, 32, True),
    ),
    "8 bits in words": Kind(
        compressed("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="group", group_size=16),
        _part(compressed_int4, bits=8, group=16),
        (8, 16, False),
    ),
    "fp8": Kind(compressed("float-quantized", num_bits=8, type="float", strategy="channel"), fp8, "fp8"),
    "fp8, a scale for all": Kind(
        {"quant_method": "fp8", "activation_scheme": "static"}, _part(fp8, tensor=True), "fp8"
    ),
    "fp8 in blocks": Kind(FP8_BLOCKS, _part(fp8, block=(32, 32)), (8, 32, False)),
    "fp8 in blocks that do not divide": Kind(
        FP8_BLOCKS | {"weight_block_size": [48, 40]}, _part(fp8, block=(48, 40)), None
    ),
    "fp8 in blocks, compressed": Kind(
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[48, 16]),
        _part(fp8, block=(48, 16), end=".weight_scale"),
        (8, 16, False),
    ),
}  # fmt: skip


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a file; the library gives no arrays of float8."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    header.pop("__metadata__", None)
    kinds = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "I64": "int64", "I8": "int8"}
    kinds["F8_E4M3"] = "float8_e4m3fn"
    return {
        name: np.frombuffer(data[slice(*about["data_offsets"])], jnp.dtype(kinds[about["dtype"]])).reshape(
            about["shape"]
        )
        for name, about in header.items()
    }


def packed(
    kind: Kind, tensors: Mapping[str, np.ndarray], chosen: Callable[[str], bool]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A checkpoint's tensors with those that are chosen quantised, and the same in float."""
    found, floats = {}, {}
    for name, tensor in tensors.items():
        if not chosen(name):
            found[name] = floats[name] = tensor
            continue
        parts, whole = kind.pack(tensor)
        floats[name] = np.ascontiguousarray(whole)
        stem = name.removesuffix(".weight")
        found |= {stem + end: np.ascontiguousarray(part) for end, part in parts.items()}
    return found, floats
