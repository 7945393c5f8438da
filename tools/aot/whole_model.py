"""A whole model's decode step and prefill for devices that are not here: programs to be traced for their shapes."""

from __future__ import annotations

import dataclasses
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
from kvjax.runtime.alike_layers import compiles_faster_by_layers, numbers_of_kind
from kvjax.runtime.kvzip_passes import Passes
from kvjax.runtime.prefill_by_layers import PREFILL_LAYER_FRESH
from kvjax.runtime.programs import DECODE_CHUNK, PREFILL_FRESH
from kvjax.runtime.single_layer_programs import LayerInput
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
    shapes = _Shapes(config, device, _Placed(mesh, rows), storage, batch, data, prompt_bucket(prompt))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        params = shapes.params(devices[0].device_kind)
        programs = {"decode": shapes.decode(params), "prefill": shapes.prefill(params)}
        by_layers = compiles_faster_by_layers(device.policy, config, device.mesh)
    numbers = dict.fromkeys(number for number, _ in numbers_of_kind(policy, params))
    layers = [shapes.prefill_layer(params, number) for number in numbers]
    return WholeModel(mesh, device, storage, programs | {"prefill_layer": layers[0]}, layers, by_layers)


@dataclasses.dataclass(frozen=True)
class _Placed:
    """Shapes of arrays on a mesh whose rows are split like ``rows``."""

    mesh: jax.sharding.Mesh
    rows: PartitionSpec

    def by(self, tree: Any, specs: Sequence[PartitionSpec]) -> Any:
        """The tree's shapes, placed by these specs of its leaves."""
        leaves, structure = jax.tree.flatten(tree)
        arrays = zip(leaves, specs, strict=True)
        made = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec)) for x, spec in arrays]
        return jax.tree.unflatten(structure, made)

    def by_row(self, tree: Any) -> Any:
        return self.by(tree, [self.rows if x.ndim else PartitionSpec() for x in jax.tree.leaves(tree)])

    def everywhere(self, tree: Any) -> Any:
        return self.by(tree, [PartitionSpec()] * len(jax.tree.leaves(tree)))


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """The shapes of a model's programs' arguments; ``capacity``: of prompts, as many tokens as are given."""

    config: ModelConfig
    device: Device
    placed: _Placed
    storage: Storage
    batch: int
    data: int
    capacity: int

    def params(self, kind: str) -> Any:
        params = abstract_decoder(self.config, DTYPE)
        if isinstance(self.device, Partition):
            # XLA leaves arguments of shard_map their default layouts.
            return self.placed.by(params, weight_specs(params, self.device.mesh))
        return jax.tree.map(lambda x: _tiled(x, kind), self.placed.everywhere(params))

    def cache(self) -> Any:
        rows = self.batch // self.data
        cache = jax.eval_shape(lambda: self.device.empty(rows, self.capacity, NEW_TOKENS, DTYPE, self.storage))
        if isinstance(self.device, Partition):
            return self.device.all(of_all(cache, cache_specs(cache), self.device.mesh))
        return self.placed.everywhere(cache)

    def ints(self, *shape: int) -> Any:
        return self.placed.by_row(jax.ShapeDtypeStruct(shape, jnp.int32))

    def decode(self, params: Any) -> Callable[[], Any]:
        cache, config = self.cache(), self.config
        state = self.placed.by_row(jax.eval_shape(lambda cache: decode_state(config, cache), cache))
        state = dataclasses.replace(state, cache=cache)
        controls = self.placed.everywhere(jax.eval_shape(lambda: benchmark_controls(config, self.batch)))
        return lambda: DECODE_CHUNK.trace(self.device, params, state, controls, self.ints())

    def prefill(self, params: Any) -> Callable[[], Any]:
        tokens, counts = self.ints(self.batch, self.capacity), self.ints(self.batch)
        sizes = {"prompt_capacity": self.capacity, "new_capacity": NEW_TOKENS, "dtype": DTYPE, "storage": self.storage}
        return lambda: PREFILL_FRESH.trace(self.device, params, tokens, counts, counts, **sizes)

    def prefill_layer(self, params: Any, number: int) -> Callable[[], Any]:
        """Prefill of the layer of that number, from hidden states that are given."""
        counts, flag = self.ints(self.batch), self.placed.everywhere(jax.ShapeDtypeStruct((), jnp.bool_))
        read = LayerInput(self.ints(self.batch, self.capacity), (counts,) * 4, flag, flag)
        x = self.placed.by_row(jax.ShapeDtypeStruct((self.batch, self.capacity, self.config.hidden_size), DTYPE))
        repeat, fed = self.device.policy.signals.repeat, None
        if repeat is not None:
            passes = Passes(repeat, read.tokens, *read.counts[:2])
            shape = passes.most, self.batch, passes.width, self.config.hidden_size
            fed = self.placed.everywhere(jax.ShapeDtypeStruct(shape, DTYPE))
        pages = self.device.pages(self.capacity, NEW_TOKENS, self.storage)[number]
        how = {"number": number, "pages": pages, "dtype": DTYPE, "storage": self.storage}
        given = without_layers(params), params.layers[number], x, fed, read
        return lambda: PREFILL_LAYER_FRESH.trace(self.device.at(number), *given, **how)


def _tiled(weight: jax.ShapeDtypeStruct, kind: str) -> jax.ShapeDtypeStruct:
    """A weight's shape, in the layout in which this kind of device multiplies it."""
    layout = weight_layout(kind, weight.dtype, weight.ndim)
    if layout is None:
        return weight
    return jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=Format(layout, weight.sharding))
