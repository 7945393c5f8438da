"""Fills a decoder's parameters from a checkpoint: strictly, one parameter at a time, straight into place and dtype."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from kvjax import progress
from kvjax.array_bytes import nbytes
from kvjax.checkpoints.checkpoint import Checkpoint, Format, Numbers
from kvjax.checkpoints.families import Weight
from kvjax.checkpoints.group_filling import GroupFilling, keeps_rows
from kvjax.checkpoints.group_formats import as_format
from kvjax.checkpoints.tensor_names import by_parameter, check_names
from kvjax.committed import committed
from kvjax.errors import WeightsError, quoted, say_once
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder, abstract_decoder
from kvjax.model.group_quantised import GroupFormat, GroupQuantised
from kvjax.model.params import logical_view
from kvjax.model.quantised import NUMBERS, Quantised, QuantisedArray, rounded_to
from kvjax.model.tiling import tiled
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.placement import quantised_specs, splits, weight_spec

# Numbers converted at a time: 1 MiB of float32 stays in a core's cache between dequantising and transposing.
_BLOCK = 1 << 18


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
    the filled buffer over. Weights that are to be quantised are as they are read, and no float copy of a parameter is
    made; of each output all inputs are read, wherever they go, so that a mesh holds the numbers that one device does.

    Args:
      config: the model; its ``weights`` say how matrices are stored.
      weights: the family's weight map.
      checkpoint: where the tensors are.
      gguf: whether its names are GGUF's.
      dtype: of every parameter that is floats.
      mesh: parameters are split over its model axis, as ``kvjax.sharding.placement`` says; by default one device. A
        host keeps what its own devices hold, and of a weight that is split by its outputs, which is how files store
        them, it reads no more than that either.

    Raises:
      WeightsError: a weight is missing, left over, of a wrong shape, too large for float16, or not finite; the
        sentence names it.
    """
    named = {weight.gguf if gguf else weight.hf: weight for weight in weights}
    check_names(config, named, checkpoint, tied="output.weight" if gguf else "lm_head.weight")
    pieces = by_parameter(weights, gguf)
    graph, state = nnx.split(abstract_decoder(config, dtype))
    flat = dict(nnx.to_flat_state(state))

    where = None if mesh is None else _shardings(config, mesh)
    kept = checkpoint.formats if config.weights == "file" else {}

    def make(path: tuple[str | int, ...], param: nnx.Variable) -> nnx.Variable:
        spec, sharding = param.get_value(), where and where(param)
        tensors = pieces[".".join(map(str, path))]
        if isinstance(spec, Quantised):
            if isinstance(spec, GroupQuantised):
                return param.replace(_group_quantised(checkpoint, tensors, param, sharding, kept))
            return param.replace(_quantised(checkpoint, tensors, param, sharding, kept))
        values = aligned(spec.shape, spec.dtype)
        needed = sharding and _needed(sharding, spec.shape)
        if values.ndim == 1:
            values[...] = 0  # norms across heads leave what belongs to values
        for name, weight in tensors:
            view = weight.place(logical_view(param, values))
            if values.dtype == np.float16:
                view[...] = 0  # what is not needed here is not read, and is looked at
            with np.errstate(over="ignore"):
                _copy(checkpoint, name, weight, values, view, needed)
            if values.dtype == np.float16 and not np.isfinite(view).all():
                raise WeightsError(
                    f"{checkpoint.origin} holds {name!r} with numbers beyond float16's 65,504; choose dtype float32 or "
                    "bfloat16."
                )
        return param.replace(tiled(_place(values, sharding)))

    # Conversion runs in NumPy, which lets other threads run; more threads than cores only hold more buffers.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        sizes = [nbytes(param.get_value()) for param in flat.values()]
        made = progress.current_stage().counting(pool.map(make, flat.keys(), flat.values()), sizes)
        filled = dict(zip(flat, made, strict=True))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _blocks(shape: tuple[int, ...], multiple: int = 1) -> Iterable[tuple[int, int]]:
    """Ranges of the first axis, each of about _BLOCK numbers and a multiple of ``multiple``."""
    rows = shape[0]
    step = max(1, _BLOCK // max(1, int(np.prod(shape[1:])) * multiple)) * multiple
    return ((start, min(rows, start + step)) for start in range(0, rows, step))


def aligned(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An uninitialised array on a 64-byte boundary, which JAX on the CPU takes over instead of copying."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


#: The parts of a matrix that this host's devices hold: (rows, columns) of each shard, a range each.
Needed = list[tuple[tuple[int, int], tuple[int, int]]]


def _copy(
    checkpoint: Checkpoint,
    name: str,
    weight: Weight,
    values: np.ndarray,
    view: np.ndarray,
    needed: Needed | None = None,
    put: Callable[[np.ndarray, slice], None] | None = None,
    at_once: bool = False,
) -> None:
    """Fill ``view``, what the tensor is of a parameter's ``values``, where it is needed.

    ``put`` quantises a part of the tensor into its place. It gets all of it ``at_once`` where inputs lead: no block of
    rows has all of an output's.
    """
    for part, start, stop in _parts(weight, values, view, needed, at_once):
        read = _rows(checkpoint, name, weight.rows, start, stop)
        read = (read if weight.change is None else weight.change(read)).reshape(view[part].shape)
        if put is None:
            view[part] = read
        else:
            put(read, part)


def _parts(
    weight: Weight, values: np.ndarray, view: np.ndarray, needed: Needed | None, at_once: bool = False
) -> Iterable[tuple[slice, int, int]]:
    """Parts of a tensor's view that are needed, and the rows that fill each, from the first to before the last."""
    count = weight.shape[0] if weight.rows is None else len(weight.rows)
    # One index of the view's first axis takes this many rows of the tensor (a head's channels, or one).
    per = count // view.shape[0]
    for start, stop in [(0, count)] if at_once else _blocks((count, *weight.shape[1:]), per):
        part = slice(start // per, stop // per)
        if needed is None or _meets(values, view[part], needed):
            yield part, start, stop


def _quantised(
    checkpoint: Checkpoint,
    tensors: Sequence[tuple[str, Weight]],
    param: nnx.Variable,
    sharding: NamedSharding | None,
    kept: Mapping[str, Format],
) -> QuantisedArray:
    """A parameter whose numbers are rounded as they are read, or which the checkpoint has with a scale an output.

    Places are of parameters. That of a tensor's scales is found by the same way, from an array of the parameter's shape
    in which all inputs of an output are one number in memory: axes without a stride are those of inputs.
    """
    spec = param.get_value()
    numbers = spec.values.dtype
    values, scale = aligned(spec.shape, numbers), aligned(spec.shape[:-1], np.float32)
    scale[...] = 1  # what is not needed here is not read
    strided = np.lib.stride_tricks.as_strided(scale, spec.shape, (*scale.strides, 0))
    needed = sharding and _needed(sharding, spec.shape)
    for name, weight in tensors:
        view, scales = (weight.place(logical_view(param, x)) for x in (values, strided))

        def put(read: np.ndarray, part: slice, view: np.ndarray = view, scales: np.ndarray = scales) -> None:
            inputs = tuple(axis for axis, stride in enumerate(scales.strides) if stride == 0)
            view[part], scales[part] = rounded_to(numbers, read, inputs)

        if NUMBERS.get(str(kept.get(name))) == numbers and keeps_rows(param, weight):
            for part, start, stop in _parts(weight, values, view, needed):
                found = _numbers(checkpoint, name, weight.rows, start, stop)
                view[part] = found.whole.view(numbers).reshape(view[part].shape)
                scales[part] = np.broadcast_to(found.scale, found.whole.shape).reshape(view[part].shape)
            continue
        _copy(checkpoint, name, weight, values, view, needed, put, scales.shape[0] > 1 and scales.strides[0] == 0)
    where = [None] * 2 if sharding is None else _beside(sharding, spec)
    return dataclasses.replace(spec, values=tiled(_place(values, where[0])), scale=_place(scale, where[1]))


def _group_quantised(
    checkpoint: Checkpoint,
    tensors: Sequence[tuple[str, Weight]],
    param: nnx.Variable,
    sharding: NamedSharding | None,
    kept: Mapping[str, Format],
) -> GroupQuantised:
    """The same with a scale for each group of inputs, rounded here or as the checkpoint has them.

    Numbers are bytes until the parameter is complete.
    """
    filling = GroupFilling(param)
    needed = sharding and _needed(sharding, filling.spec.shape)
    for name, weight in tensors:
        view = filling.view(weight)
        if kept:
            for part, start, stop in _parts(weight, filling.whole, view, needed):
                own = kept[name]
                assert isinstance(own, GroupFormat)
                found = as_format(_numbers(checkpoint, name, weight.rows, start, stop), own, filling.format)
                filling.keep(weight, found, part)
            continue
        put, at_once = filling.rounding(weight)
        _copy(checkpoint, name, weight, filling.whole, view, needed, put, at_once)
    names = [name for name in ("values", "scale", "minimum") if getattr(filling.spec, name) is not None]
    where = [None] * len(names) if sharding is None else _beside(sharding, filling.spec)
    arrays = [x for x in filling.arrays() if x is not None]
    placed = {name: _place(x, at) for name, x, at in zip(names, arrays, where, strict=True)}
    return dataclasses.replace(filling.spec, **placed)


def _beside(sharding: NamedSharding, spec: Quantised) -> list[NamedSharding]:
    """The shardings of a quantised matrix's arrays, from that of the matrix."""
    return [NamedSharding(sharding.mesh, each) for each in quantised_specs(sharding.spec, spec)]


def _numbers(
    checkpoint: Checkpoint, name: str, rows: Sequence[int] | np.ndarray | None, start: int, stop: int
) -> Numbers:
    """:func:`_rows` as they are quantised."""
    if rows is None:
        found = checkpoint.numbers(name, start, stop)
    else:
        wanted = np.asarray(rows[start:stop])
        first = int(wanted.min())
        read = checkpoint.numbers(name, first, int(wanted.max()) + 1)
        minimum = None if read.minimum is None else read.minimum[wanted - first]
        found = Numbers(read.whole[wanted - first], read.scale[wanted - first], minimum)
    if not all(is_finite(x) for x in found[1:] if x is not None):
        raise WeightsError(f"{checkpoint.origin} is corrupt: {quoted(name)} holds what is no finite number.")
    return found


def _rows(
    checkpoint: Checkpoint, name: str, rows: Sequence[int] | np.ndarray | None, start: int, stop: int
) -> np.ndarray:
    """Rows ``start:stop`` of those that a weight takes of its tensor; WeightsError where a number of them is none."""
    if rows is None:
        found = checkpoint.read(name, start, stop)
    else:
        wanted = np.asarray(rows[start:stop])
        first = int(wanted.min())
        found = checkpoint.read(name, first, int(wanted.max()) + 1)[wanted - first]
    if not is_finite(found):
        raise WeightsError(f"{checkpoint.origin} is corrupt: {quoted(name)} holds what is no finite number.")
    return found


#: Bits of the exponents of 16-bit floats, all set in what is infinite or no number.
_EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80}


def is_finite(values: np.ndarray) -> bool:
    """Whether every number is finite: 0.05 ms for 1 MiB of float32, where dequantising it takes 0.35."""
    mask = _EXPONENT.get(values.dtype.name)
    if mask is not None:
        return not values.size or int((values.view(np.uint16) & mask).max()) != mask
    # The sum is not finite where a number is not; sums of large numbers may overflow, and are looked at again.
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduce(values, axis=None)
    return bool(np.isfinite(total)) or bool(np.isfinite(values).all())


def _meets(values: np.ndarray, target: np.ndarray, needed: Needed) -> bool:
    """Whether a part of a matrix may lie in what is needed: its first and last number bound what it touches."""
    low, high = np.lib.array_utils.byte_bounds(target)
    width = values.shape[1]
    (top, left), (bottom, right) = (
        divmod((byte - values.ctypes.data) // values.itemsize, width) for byte in (low, high - 1)
    )
    return any(
        top < last_row and first_row <= bottom and (left > right or (left < last_column and first_column <= right))
        for (first_row, last_row), (first_column, last_column) in needed
    )


def _shardings(config: ModelConfig, mesh: Mesh) -> Callable[[nnx.Variable], NamedSharding]:
    split, devices = splits(mesh, config), mesh.jax
    return lambda param: NamedSharding(devices, weight_spec(param, split))


def _needed(sharding: NamedSharding, shape: tuple[int, ...]) -> Needed | None:
    """The parts of a matrix that this host's devices hold; None for a vector, which is small."""
    if len(shape) != 2:
        return None
    shards = sharding.addressable_devices_indices_map(shape).values()
    return [(index[0].indices(shape[0])[:2], index[1].indices(shape[1])[:2]) for index in shards if index is not None]


def _place(values: np.ndarray, sharding: NamedSharding | None) -> jax.Array:
    if sharding is None:
        return committed(jax.device_put(values))
    if sharding.is_fully_replicated and sharding.is_fully_addressable:
        return jax.device_put(values, sharding)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: np.ascontiguousarray(values[index]))


def default_dtype() -> DTypeLike:
    """bfloat16 on accelerators; float32 on the CPU, whose bfloat16 products are slow, and on GPUs without any.

    GPUs before Ampere (compute capability 8.0) emulate them. float16 they do multiply, but numbers of a model that was
    trained in bfloat16 may overflow there, so that is for the user to choose.
    """
    if jax.default_backend() == "cpu":
        return jnp.float32
    capability = str(getattr(jax.local_devices()[0], "compute_capability", ""))
    major, _, minor = capability.partition(".")
    if not (major.isdigit() and int(major) < 8):
        return jnp.bfloat16
    say_once(
        f"This GPU (compute capability {major}.{minor or 0}) does not multiply bfloat16, so weights and cache are "
        "float32; dtype float16 takes half the memory, where the model's numbers fit it."
    )
    return jnp.float32
