"""A whole model's decode step and prefill for devices that are not here: programs to be traced for their shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.bench.shapes import shapes
from kvjax.cache.buckets import NEW_TOKENS, prompt_bucket
from kvjax.cache.layout import layout_on
from kvjax.cache.quantisation import Storage
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import abstract_decoder, without_layers
from kvjax.model.tiling import weight_layout
from kvjax.policies.base import Policy
from kvjax.runtime.alike import numbers_of_kind
from kvjax.runtime.by_layers import PREFILL_LAYER_FRESH, compiles_faster_by_layers
from kvjax.runtime.programs import DECODE_CHUNK, PREFILL_FRESH
from kvjax.runtime.single_layers import LayerInput
from kvjax.runtime.synthetic import benchmark_controls, decode_state
from kvjax.sharding.compile import Device, OneDevice
from kvjax.sharding.mesh import Mesh, near_grid
from kvjax.sharding.partition import Partition
from kvjax.sharding.placement import ROWS, cache_specs, of_all, weight_specs

LLAMA_8B = shapes()["llama-3.1-8b"]
LLAMA_70B = dataclasses.replace(LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)
DTYPE = jnp.dtype("bfloat16")


@dataclasses.dataclass(frozen=True)
class WholeModel:
    """A model on its devices.

    Attributes:
      mesh: JAX's mesh of the devices. device: what the programs are compiled for. storage: of the cache.
      programs: "decode", "prefill" and "prefill_layer", of the first layer, each a function that traces it: a
        ``jax.stages.Traced``.
      layers: those of the last kind, one for each kind of layer. by_layers: whether prompts are read by them.
    """

    mesh: jax.sharding.Mesh
    device: Device
    storage: Storage
    programs: Mapping[str, Callable[[], Any]]
    layers: Sequence[Callable[[], Any]]
    by_layers: bool


def whole_model(
    config: ModelConfig,
    devices: Sequence[Any],
    data: int,
    model: int,
    policy: Policy,
    *,
    batch: int,
    prompt: int,
) -> WholeModel:
    """The programs of ``batch`` prompts of a length on a ``data`` x ``model`` mesh, or on one device.

    Args:
      devices: of a topology that is described, of one platform; on one device the first of them is used.
    """
    platform = "tpu" if devices[0].platform == "tpu" else "gpu"
    storage = Storage(layout=layout_on(platform, config.head_dim))
    if data * model == 1:
        device: Device = OneDevice(config, policy)
        mesh, rows = jax.sharding.Mesh(np.array(devices[:1]), ("x",)), PartitionSpec()
    else:
        grid = Mesh(data, model, tuple(near_grid(data, model, devices).flat))
        device, mesh, rows = Partition(grid, config, policy), grid.jax, ROWS

    def placed(tree: Any, specs: Sequence[Any] | None = None) -> Any:
        """The tree's shapes, placed by these specs of its leaves; by default rows where they lead."""
        leaves, structure = jax.tree.flatten(tree)
        specs = [rows if x.ndim else PartitionSpec() for x in leaves] if specs is None else specs
        arrays = zip(leaves, specs, strict=True)
        made = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)) for x, spec in arrays]
        return jax.tree.unflatten(structure, made)

    def everywhere(tree: Any) -> Any:
        return placed(tree, [PartitionSpec()] * len(jax.tree.leaves(tree)))

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    params = abstract_decoder(config, DTYPE)
    capacity = prompt_bucket(prompt)
    sizes = {"prompt_capacity": capacity, "new_capacity": NEW_TOKENS, "dtype": DTYPE, "storage": storage}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        cache = jax.eval_shape(lambda: device.empty(batch // data, *sizes.values()))
        if isinstance(device, Partition):
            params = placed(params, weight_specs(params, device.mesh))
            cache = device.all(of_all(cache, cache_specs(cache), device.mesh))
        else:
            # On a mesh XLA leaves arguments of shard_map their default layouts.
            params = jax.tree.map(lambda x: _tiled(x, devices[0].device_kind), everywhere(params))
            cache = everywhere(cache)
        state = placed(jax.eval_shape(lambda cache: decode_state(config, cache), cache))
        state = dataclasses.replace(state, cache=cache)
        controls = everywhere(jax.eval_shape(lambda: benchmark_controls(config, batch)))
    tokens, counts = placed(ints(batch, capacity)), placed(ints(batch))
    programs = {
        "decode": lambda: DECODE_CHUNK.trace(device, params, state, controls, everywhere(ints())),
        "prefill": lambda: PREFILL_FRESH.trace(device, params, tokens, counts, counts, **sizes),
    }
    x = placed(jax.ShapeDtypeStruct((batch, capacity, config.hidden_size), DTYPE))
    flag = everywhere(jax.ShapeDtypeStruct((), jnp.bool_))
    read = LayerInput(tokens, (counts,) * 4, flag, flag)
    pages = device.pages(capacity, NEW_TOKENS, storage)

    def layer(number: int) -> Any:
        how = {"number": number, "pages": pages[number], "dtype": DTYPE, "storage": storage}
        given = without_layers(params), params.layers[number], x, read
        return PREFILL_LAYER_FRESH.trace(device.at(number), *given, **how)

    numbers = dict.fromkeys(number for number, _ in numbers_of_kind(policy, params))
    layers = [functools.partial(layer, number) for number in numbers]
    programs["prefill_layer"] = layers[0]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        by_layers = compiles_faster_by_layers(device.policy, params, device.mesh)
    return WholeModel(mesh, device, storage, programs, layers, by_layers)


def _tiled(weight: jax.ShapeDtypeStruct, kind: str) -> jax.ShapeDtypeStruct:
    """A weight's shape, in the layout in which this kind of device multiplies it."""
    layout = weight_layout(kind, weight.dtype, weight.ndim)
    if layout is None:
        return weight
    return jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=Format(layout, weight.sharding))
