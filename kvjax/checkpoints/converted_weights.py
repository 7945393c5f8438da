"""Reads the arrays of a converted model straight to their devices, each chunk checked as it comes.

Orbax writes each chunk to a file of its own, as Zarr says (version 3, codec ``sharding_indexed`` with one chunk a
shard, no compression): the numbers in order, then 20 bytes of an index. Such a file is read and checked in one buffer
that stays in the processor's cache, and copied into place. Reading through TensorStore, which Orbax does, takes the
processor several times as long, and importing Orbax longer than to read a small model. Of an array that is sharded a
host reads the chunks that its own devices' shards touch, and no others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from kvjax import progress
from kvjax.array_bytes import nbytes
from kvjax.checkpoints.converted import PARAMETERS, WEIGHTS, Description, StoredArray, damaged
from kvjax.checkpoints.fill import aligned, is_finite
from kvjax.checkpoints.safetensors import read_json
from kvjax.committed import committed
from kvjax.errors import WeightsError, quoted
from kvjax.model.decoder import Decoder, abstract_decoder
from kvjax.model.tiling import tiled
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.placement import weight_specs

#: Bytes of the index that follows a chunk's numbers: their place, 8 bytes, their size, 8, and its checksum, 4.
INDEX = 20
#: Dtypes that are cast to one another as they are read.
_FLOATS = ("float32", "bfloat16", "float16")
#: The part of an array that a device holds: (first, last + 1) along each axis.
Region = tuple[tuple[int, int], ...]


def leaf_names(params: Decoder) -> list[str]:
    """A name for every leaf of a decoder, in their order: the parameter's path, and its part where it has several."""
    found = []
    variables = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, nnx.Variable))[0]
    for path, param in variables:
        for inner, _ in jax.tree_util.tree_flatten_with_path(param.get_value())[0]:
            found.append(jax.tree_util.keystr((*path, *inner), simple=True, separator="."))
    return found


def chunk_path(folder: Path, name: str, cell: tuple[int, ...]) -> Path:
    """The file of a chunk, by its place in the array's grid."""
    return folder / WEIGHTS / PARAMETERS / name / "c" / "/".join(map(str, cell))


def read_weights(folder: Path, description: Description, dtype: DTypeLike, mesh: Mesh | None) -> Decoder:
    """The decoder of a converted model, each parameter on the devices of a mesh, or on the default one.

    Args:
      folder: the converted model.
      description: of it.
      dtype: of the parameters that are floats, which are cast if they are stored in another.
      mesh: as for :func:`kvjax.checkpoints.fill.fill`.

    Raises:
      WeightsError: an array is missing, left over, of another shape, changed, not finite, or too large for float16.
    """
    params = abstract_decoder(description.config, dtype)
    specs, tree = jax.tree.flatten(params)
    named = dict(zip(leaf_names(params), specs, strict=True))
    _check_names(folder, description, named)
    shardings: list[NamedSharding | None] = [None] * len(named)
    if mesh is not None:
        shardings = [NamedSharding(mesh.jax, spec) for spec in weight_specs(params, mesh)]
    read = functools.partial(_read, folder, description)
    # Files and checksums let other threads run; more threads than cores only hold more buffers.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        made = pool.map(read, named, named.values(), shardings)
        leaves = list(progress.current_stage().counting(made, list(map(nbytes, named.values()))))
    return jax.tree.unflatten(tree, leaves)


def _check_names(folder: Path, description: Description, named: dict[str, Any]) -> None:
    """Every array of the model is described once with its shape and kind, and nothing else is."""
    arrays = description.arrays
    for name in [*named, *arrays]:
        if name not in arrays:
            raise damaged(folder, f"it lacks {quoted(name)}")
        if name not in named:
            raise damaged(folder, f"it holds {quoted(name)}, which its model does not have")
        spec, stored = named[name], arrays[name]
        floats = spec.dtype.name in _FLOATS and stored.dtype in _FLOATS
        if stored.shape != spec.shape or not (floats or stored.dtype == spec.dtype.name):
            raise damaged(
                folder,
                f"{quoted(name)} is {stored.dtype} {list(stored.shape)} and its model has {spec.dtype.name} "
                f"{list(spec.shape)}",
            )


def _read(folder: Path, description: Description, name: str, spec: Any, sharding: NamedSharding | None) -> jax.Array:
    """One leaf, on its devices."""
    stored = description.arrays[name]

    def part(region: Region) -> np.ndarray:
        return _region(folder, name, stored, region, spec.dtype)

    whole = tuple((0, size) for size in stored.shape)
    if sharding is None:
        return tiled(committed(jax.device_put(part(whole))))
    if sharding.is_fully_replicated and sharding.is_fully_addressable:
        return tiled(jax.device_put(part(whole), sharding))

    def bounds(index: Any) -> Region:
        return tuple(axis.indices(size)[:2] for axis, size in zip(index, stored.shape, strict=True))

    # Devices along the data axis hold the same part, which is read once.
    needed = {bounds(index) for index in sharding.addressable_devices_indices_map(stored.shape).values()}
    parts = {region: part(region) for region in needed}
    return tiled(jax.make_array_from_callback(stored.shape, sharding, lambda index: parts[bounds(index)]))


def _region(folder: Path, name: str, stored: StoredArray, region: Region, dtype: np.dtype[Any]) -> np.ndarray:
    """A part of an array in a dtype, from the chunks that it touches, each of which is checked."""
    out, held = aligned(tuple(stop - start for start, stop in region), dtype), np.dtype(stored.dtype)
    size = math.prod(stored.chunk) * held.itemsize
    buffer = np.empty(size + INDEX, np.uint8)
    axes = list(zip(region, stored.chunk, strict=True))
    for cell in itertools.product(*(range(start // step, -(-stop // step)) for (start, stop), step in axes)):
        path = chunk_path(folder, name, cell)
        try:
            with path.open("rb", buffering=0) as file:
                whole = file.readinto(buffer.data) == buffer.size and not file.read(1)
        except OSError as error:
            raise damaged(folder, f"{path.relative_to(folder)} cannot be read ({error.strerror})") from error
        if not whole or zlib.crc32(buffer.data) != stored.crc32[int(np.ravel_multi_index(cell, stored.grid))]:
            raise damaged(folder, f"numbers of {quoted(name)} were changed")
        # Chunks are of one size; what is beyond the array's ends is not of the array.
        values = buffer[:size].view(held).reshape(stored.chunk)
        both = [
            (i * step, max(start, i * step), min(stop, (i + 1) * step))
            for i, ((start, stop), step) in zip(cell, axes, strict=True)
        ]
        source = values[tuple(slice(low - at, high - at) for at, low, high in both)]
        target = out[
            tuple(slice(low - start, high - start) for (_, low, high), (start, _) in zip(both, region, strict=True))
        ]
        if stored.dtype in _FLOATS and not is_finite(source):
            raise damaged(folder, f"{quoted(name)} holds what is no finite number")
        with np.errstate(over="ignore"):
            target[...] = source
        if dtype == np.float16 and not is_finite(target):
            raise WeightsError(
                f"{folder} holds {quoted(name)} with numbers beyond float16's 65,504; choose dtype float32 or bfloat16."
            )
    return out


def described(folder: Path, name: str, values: np.ndarray) -> StoredArray:
    """The description of an array that has just been written, of which every chunk is read back and compared."""
    about = read_json(folder / WEIGHTS / PARAMETERS / name / "zarr.json")
    chunk = tuple(about["chunk_grid"]["configuration"]["chunk_shape"])
    stored = StoredArray(values.shape, jnp.dtype(values.dtype).name, chunk, ())
    size, checksums = math.prod(chunk) * values.dtype.itemsize, []
    for cell in np.ndindex(*stored.grid):
        content = chunk_path(folder, name, cell).read_bytes()
        found = np.frombuffer(content, values.dtype, math.prod(chunk)).reshape(chunk)
        wanted = values[tuple(slice(i * step, (i + 1) * step) for i, step in zip(cell, chunk, strict=True))]
        found = found[tuple(map(slice, wanted.shape))]
        if len(content) != size + INDEX or found.tobytes() != wanted.tobytes():
            raise OSError(f"what was written of {quoted(name)} is not what can be read back")
        checksums.append(zlib.crc32(content))
    return dataclasses.replace(stored, crc32=tuple(checksums))
