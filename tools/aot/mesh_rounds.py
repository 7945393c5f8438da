"""Compile a question under Round Attention, as a mesh runs it, for a TPU topology; used by ``tools.aot.mesh``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding

from kvjax.bench.shapes import shapes
from kvjax.cache.buckets import NEW_TOKENS, prompt_bucket
from kvjax.cache.host_memory import DEVICE, HOST
from kvjax.cache.layout import layout_on
from kvjax.cache.quantisation import Storage
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import abstract_decoder
from kvjax.policies.split_cache import SplitCache
from kvjax.rounds import round_programs
from kvjax.rounds.conversation import UpperRows
from kvjax.rounds.steps import empty_stage
from kvjax.sharding.compile import Named, specs_of
from kvjax.sharding.hlo_collectives import collectives
from kvjax.sharding.mesh import Mesh, near_grid
from kvjax.sharding.partition import Partition
from kvjax.sharding.placement import ROWS, cache_specs, of_all, weight_specs
from tools.aot.mesh_sizes import BATCH, QUESTION, ROUND, SEEN, SELECTED

DTYPE = jnp.dtype("bfloat16")


def compile_rounds(topology: str, data: int, model: int, layers: int) -> dict[str, Any]:
    """XLA's analysis of each program of a turn, half of the layers below the watershed."""
    config = dataclasses.replace(shapes()["llama-3.1-8b"], num_layers=layers)
    devices = near_grid(data, model, topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    turn = _Turn(config, data, model, devices)
    programs = {name: _analysis(lowered) for name, lowered in (turn.of_all_rows() | turn.of_one_row()).items()}
    return {"round_share": turn.round.kv.size * DTYPE.itemsize // model, "programs": programs}


def _analysis(lowered: Any) -> dict[str, Any]:
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    return {
        "host": memory.host_argument_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "collectives": collectives(compiled.as_text()),
    }


@dataclasses.dataclass(frozen=True)
class _Turn:
    """Shapes of what the programs of a turn take, on all devices or on those of one row of the mesh."""

    config: ModelConfig
    data: int
    model: int
    devices: np.ndarray

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.data, self.model, tuple(self.devices.flat))

    @property
    def row(self) -> Mesh:
        return Mesh(1, self.model, tuple(self.devices[0]))

    @property
    def below(self) -> int:
        """The watershed."""
        return self.config.num_layers // 2

    @property
    def above(self) -> int:
        return self.config.num_layers - self.below

    @property
    def capacity(self) -> int:
        return prompt_bucket(SEEN)

    @property
    def storage(self) -> Storage:
        return Storage(layout=layout_on("tpu", self.config.head_dim))

    @property
    def round(self) -> UpperRows:
        """One round of one row, as it is taken to the device."""
        shape: Any = jax.ShapeDtypeStruct((self.above, 2, self.config.num_kv_heads, ROUND, self.config.head_dim), DTYPE)
        return UpperRows(shape)

    def part(self, on: Mesh, selected: int | None = None) -> Partition:
        return Partition(on, self.config, SplitCache(self.below, *([] if selected is None else [selected])))

    def cache(self, part: Partition, first: int, last: int) -> Any:
        """Layers of the cache of all the rows that the mesh of a part has."""
        rows = BATCH // self.data
        local = jax.eval_shape(lambda: part.empty(rows, self.capacity, NEW_TOKENS, DTYPE, self.storage))
        local = local.replace(layers=local.layers[first:last])
        return part.all(of_all(local, cache_specs(local), part.mesh))

    def stage(self, part: Partition, rows: int) -> Any:
        sizes = (self.above, 2, rows, self.config.num_kv_heads, SELECTED, self.config.head_dim)
        return _placed(part, jax.eval_shape(lambda: empty_stage(sizes, DTYPE, False)))

    def params(self) -> Any:
        leaves, tree = jax.tree.flatten(abstract_decoder(self.config, DTYPE))
        specs = weight_specs(jax.tree.unflatten(tree, leaves), self.mesh)
        arrays = [_array(self.mesh, x.shape, x.dtype, spec) for x, spec in zip(leaves, specs, strict=True)]
        return jax.tree.unflatten(tree, arrays)

    def of_all_rows(self) -> dict[str, Any]:
        """The programs of the whole mesh, lowered."""
        mesh, lower, upper = self.mesh, self.part(self.mesh), self.part(self.mesh, SELECTED)
        params, counts = self.params(), _array(mesh, (BATCH,), jnp.int32, ROWS)
        tokens = _array(mesh, (BATCH, QUESTION), jnp.int32, ROWS)
        x = _array(mesh, (BATCH, QUESTION, self.config.hidden_size), DTYPE, ROWS)
        selected = jax.ShapeDtypeStruct((self.above, BATCH, self.config.num_kv_heads), jnp.int32)
        slots = _placed(upper, Named(selected, (None, "batch", "kv_head")))
        stage, kinds = self.stage(upper, BATCH), {"dtype": DTYPE, "storage": self.storage}
        with jax.sharding.use_abstract_mesh(mesh.jax.abstract_mesh):
            return {
                "lower layers": round_programs.LOWER_ONTO.lower(
                    lower, params, self.cache(lower, 0, self.below), tokens, counts, capacity=self.capacity
                ),
                "upper layers": round_programs.UPPER.lower(upper, params, x, counts, counts, stage, slots, **kinds),
            }

    def of_one_row(self) -> dict[str, Any]:
        """The programs of the devices that share one row, lowered."""
        part = self.part(self.row, SELECTED)
        there, here = (_placed(part, self.round, memory) for memory in (HOST, DEVICE))
        answered, stage = self.cache(part, self.below, self.config.num_layers), self.stage(part, BATCH // self.data)
        at, offset = np.int32(0), Named(np.zeros((1, 1), np.int32), ())
        edges = Named(np.zeros((self.above, self.config.num_kv_heads), np.int32), (None, "kv_head"))
        with jax.sharding.use_abstract_mesh(self.row.jax.abstract_mesh):
            move = jax.jit(lambda x: jax.device_put(x, here.kv.sharding), out_shardings=here.kv.sharding)
            return {
                "one round to the device": move.lower(there.kv),
                "one round into place": round_programs.PLACE_ROUND.lower(part, stage, here, at, offset),
                "one round cut out": round_programs.CUT_ROUND.lower(part, answered, at, edges, edges, size=ROUND),
            }


def _array(on: Mesh, shape: tuple[int, ...], dtype: Any, spec: Any, memory: str = DEVICE) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on.jax, spec, memory_kind=memory))


def _placed(part: Partition, tree: Any, memory: str = DEVICE) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    arrays = zip(leaves, specs_of(tree, part), strict=True)
    return jax.tree.unflatten(structure, [_array(part.mesh, x.shape, x.dtype, s, memory) for x, s in arrays])
