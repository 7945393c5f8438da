"""Fills a decoder's parameters from a checkpoint: strictly, one parameter at a time, straight into place and dtype."""

from __future__ import annotations

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from kvjax.config import ModelConfig
from kvjax.errors import WeightsError
from kvjax.model.checkpoint import Checkpoint
from kvjax.model.decoder import Decoder, abstract_decoder
from kvjax.model.weight_map import Weight

# Numbers converted at a time: 1 MiB of float32 stays in a core's cache between dequantising and transposing.
_BLOCK = 1 << 18
# Buffers that transformers once saved and that follow from the configuration.
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|rope_(freqs|factors_(short|long))\.weight")
_SHARDED = ("kv_heads", "mlp", "vocab")


def fill(
    config: ModelConfig,
    weights: Sequence[Weight],
    checkpoint: Checkpoint,
    *,
    gguf: bool,
    dtype: DTypeLike,
    mesh: Mesh | None,
) -> Decoder:
    """A decoder with every parameter read from ``checkpoint``.

    Host memory beyond the parameters themselves stays at a parameter per thread, and none on the CPU, where JAX takes
    the filled buffer over.

    Args:
      config: the model.
      weights: the family's weight map.
      checkpoint: where the tensors are.
      gguf: whether its names are GGUF's.
      dtype: float32 or bfloat16, of every parameter.
      mesh: with an axis called "model", parameters are split over it along their KV-head, MLP or vocabulary axis
        where it divides; other axes, and no mesh, hold copies or one device.

    Raises:
      WeightsError: a weight is missing, left over, or of a wrong shape; the sentence names it.
    """
    named = {weight.gguf if gguf else weight.hf: weight for weight in weights}
    check_names(config, named, checkpoint, tied="output.weight" if gguf else "lm_head.weight")
    pieces: dict[str, list[tuple[str, Weight]]] = defaultdict(list)
    for name, weight in named.items():
        pieces[weight.param].append((name, weight))
    graph, state = nnx.split(abstract_decoder(config, dtype))
    flat = dict(nnx.to_flat_state(state))

    def make(path: tuple[str | int, ...], param: nnx.Variable) -> nnx.Variable:
        spec = param.get_value()
        values = _aligned(spec.shape, spec.dtype)
        for name, weight in pieces[".".join(map(str, path))]:
            _copy(checkpoint, name, weight, values.reshape(param.get_metadata("logical", spec.shape)))
        return param.replace(_place(values, _stored_axes(param), mesh))

    # Conversion runs in NumPy, which lets other threads run; more threads than cores only hold more buffers.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        filled = dict(zip(flat, pool.map(make, flat.keys(), flat.values()), strict=True))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def check_names(config: ModelConfig, named: dict[str, Weight], checkpoint: Checkpoint, *, tied: str) -> None:
    """Every weight of the model is there once with its shape, and nothing else is; WeightsError names the first not.

    A head that repeats the tied embedding is accepted when it holds the same values.
    """
    shapes = checkpoint.shapes
    missing = [name for name in named if name not in shapes]
    extra = [name for name in shapes if name not in named and not _HARMLESS.fullmatch(name)]
    repeated = config.tie_embeddings and tied in extra
    if repeated:
        extra.remove(tied)
    if missing:
        raise WeightsError(f"{checkpoint.origin} lacks {_list(missing)}{_hint(missing[0], extra)}.")
    if extra:
        raise WeightsError(f"{checkpoint.origin} holds {_list(extra)}, which a {config.family} model does not have.")
    for name, weight in named.items():
        if tuple(shapes[name]) != weight.shape:
            raise WeightsError(
                f"{checkpoint.origin} holds {name!r} with shape {list(shapes[name])}; its configuration asks for "
                f"{list(weight.shape)}."
            )
    if repeated:
        _check_tied(next(iter(named)), tied, checkpoint)


def _check_tied(embedding: str, head: str, checkpoint: Checkpoint) -> None:
    shapes = checkpoint.shapes
    same = shapes.get(embedding) == shapes[head]
    for start, stop in _blocks(shapes[head]) if same else ():
        same = same and np.array_equal(checkpoint.read(embedding, start, stop), checkpoint.read(head, start, stop))
    if not same:
        raise WeightsError(f"{checkpoint.origin} ties its output to its embedding and also holds a different {head!r}.")


def _list(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 1} more weights" if len(names) > 1 else ""
    return f"the weight {names[0]!r}{rest}"


def _hint(name: str, extra: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, extra, 1)
    return f" and holds {close[0]!r} instead" if close else ""


def _blocks(shape: tuple[int, ...], multiple: int = 1) -> Iterable[tuple[int, int]]:
    """Ranges of the first axis, each of about _BLOCK numbers and a multiple of ``multiple``."""
    rows = shape[0]
    step = max(1, _BLOCK // max(1, int(np.prod(shape[1:])) * multiple)) * multiple
    return ((start, min(rows, start + step)) for start in range(0, rows, step))


def _aligned(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An uninitialised array on a 64-byte boundary, which JAX on the CPU takes over instead of copying."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


def _copy(checkpoint: Checkpoint, name: str, weight: Weight, values: np.ndarray) -> None:
    view = weight.place(values)
    # One index of the view's first axis takes this many rows of the tensor (a head's channels, or one).
    per = weight.shape[0] // view.shape[0]
    for start, stop in _blocks(weight.shape, per):
        target = view[start // per : stop // per]
        target[...] = checkpoint.read(name, start, stop).reshape(target.shape)


def _stored_axes(param: nnx.Variable) -> tuple[tuple[str | None, int], ...]:
    """Name and size of the logical axis that leads each stored axis: a share of it is a share of the stored one."""
    names, shape = param.get_metadata("axes"), param.get_metadata("logical", param.get_value().shape)
    leading = [0, param.get_metadata("inputs", 1)][: len(param.get_value().shape)]
    return tuple((names[i], shape[i]) for i in leading)


def _place(values: np.ndarray, axes: tuple[tuple[str | None, int], ...], mesh: Mesh | None) -> jax.Array:
    if mesh is None:
        return jax.device_put(values)
    split = mesh.shape.get("model", 1)

    def physical(axis: str | None, size: int) -> str | None:
        return "model" if axis in _SHARDED and split > 1 and size % split == 0 else None

    spec = PartitionSpec(*(physical(axis, size) for axis, size in axes))
    return jax.device_put(values, NamedSharding(mesh, spec))


def default_dtype() -> DTypeLike:
    """float32 on the CPU, whose bfloat16 products are slow, and bfloat16 on accelerators."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
