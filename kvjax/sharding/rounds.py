"""Round Attention on a mesh: rounds in the host memory of the devices that attend to them, each device its own share.

The layers of a batch are read by all devices at once, as every prefill on a mesh. A round belongs to one row: it is an
array of the devices that its row is on, the *row of the mesh*. KV heads are dealt over them as those of the pools are;
where devices share a head, each has a block of its slots, and they are joined on the devices, never on the host. So a
question's transfer is divided by the model axis whatever the heads are, and no device moves what another one needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool

from kvjax.cache.cache import Cache, attach, detach
from kvjax.cache.host_memory import HOST, sendable
from kvjax.cache.page_sharding import PageSharding
from kvjax.cache.pool import LayerCache
from kvjax.cache.quantisation import Storage
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.policies.split_cache import SplitCache
from kvjax.rounds.conversation import Conversation, UpperRows
from kvjax.rounds.programs import ONE_DEVICE, RoundPrograms, RoundSlice, RoundUpload, alike
from kvjax.rounds.steps import StagingBuffer, empty_stage, pages_onto
from kvjax.sharding import round_programs as programs
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.partition import Partition, head_sharding
from kvjax.sharding.placement import cache_specs, leaves_of
from kvjax.sharding.round_programs import on_mesh, round_specs, slots_spec, stage_specs
from kvjax.sharding.run import put_rows


def round_programs(mesh: Mesh | None, config: ModelConfig) -> RoundPrograms:
    """What conversations of a model on these devices run on."""
    return ONE_DEVICE if mesh is None else RoundsOnMesh(mesh, config)


@dataclasses.dataclass(frozen=True)
class RoundsOnMesh:
    """The programs of a model on a mesh; see :class:`kvjax.rounds.programs.RoundPrograms`.

    Raises:
      UsageError: the devices of one row of the mesh belong to several processes.
    """

    mesh: Mesh
    config: ModelConfig

    def __post_init__(self) -> None:
        if any(len({device.process_index for device in row}) > 1 for row in self._grid):
            raise UsageError(
                "RoundAttention keeps a row's rounds in the memory of one host; make the model axis no longer than "
                "the devices of a process."
            )

    @property
    def _grid(self) -> np.ndarray:
        """[data, model] devices."""
        return self.mesh.jax.devices.reshape(self.mesh.data, -1)

    @property
    def _sharding(self) -> PageSharding:
        return head_sharding(self.mesh, self.config)

    def _row(self, index: int) -> Mesh:
        """A row of the mesh as a mesh of its own."""
        return Mesh(1, self.mesh.model, tuple(self._grid[index]))

    def _here(self, index: int) -> bool:
        """Whether that row's devices are this process's."""
        return self._grid[index, 0].process_index == jax.process_index()

    def rows(self, batch: int) -> int:
        return self.mesh.rows(batch)

    def check(self, conversation: Conversation) -> None:
        each = self.rows(conversation.batch) // self.mesh.data
        for row, parts in enumerate(conversation.rounds):
            process = self._grid[row // each, 0].process_index
            for part in (conversation.prefix[row], *parts):
                if any(device.process_index != process for device in part.upper.kv.sharding.device_set):
                    raise UsageError(
                        f"The rounds of row {row} are in another host's memory; give every conversation the place in "
                        "the batch that it had, and no context= or n= over several hosts."
                    )

    # --- reading ----------------------------------------------------------------------------------------------

    def lower_fresh(
        self,
        params: Decoder,
        tokens: np.ndarray,
        count: np.ndarray,
        *,
        policy: SplitCache,
        room: int,
        dtype: Any,
        storage: Storage,
    ) -> tuple[Cache, jax.Array]:
        part = Partition(self.mesh, self.config, policy)
        rooms = {"room": room, "dtype": dtype, "storage": storage}
        return programs.lower_fresh(params, *put_rows(self.mesh, tokens, count), part=part, **rooms)

    def lower_onto(
        self, params: Decoder, cache: Cache, tokens: np.ndarray, count: np.ndarray, *, room: int, consume: bool
    ) -> tuple[Cache, jax.Array, jax.Array]:
        part = Partition(self.mesh, self.config, cache.policy)
        old, rest = detach(cache)
        local = part.local(cache)
        pages = pages_onto(part.config_of(0), local, room)
        reusable = pages == tuple(layer.pages for layer in local.layers)
        run = programs.lower_onto_consuming if consume and reusable else programs.lower_onto
        pools, rest, x, mass = run(params, old, rest, *put_rows(self.mesh, tokens, count), part=part, room=room)
        if consume and not reusable:
            jax.tree.map(lambda pool: pool.delete(), old)
        return attach(pools, rest), x, mass

    def upper(
        self,
        params: Decoder,
        x: jax.Array,
        seen: np.ndarray,
        count: np.ndarray,
        staged: StagingBuffer | None,
        length: np.ndarray | None,
        *,
        policy: SplitCache,
        dtype: Any,
        storage: Storage,
    ) -> tuple[tuple[LayerCache, ...], jax.Array]:
        part = Partition(self.mesh, self.config, policy)
        slots = None if length is None else put_rows(self.mesh, length, spec=slots_spec(self._sharding))[0]
        kinds = {"dtype": dtype, "storage": storage}
        rows = put_rows(self.mesh, seen, count)
        cache, logits = programs.upper(params, x, *rows, staged, slots, part=part, **kinds)
        return tuple(cache.layers), logits  # pyright: ignore[reportReturnType]

    # --- rounds, of one row each ------------------------------------------------------------------------------

    def stage(
        self, uploads: Sequence[RoundUpload], shape: tuple[int, ...], dtype: Any, beside: jax.Array
    ) -> StagingBuffer:
        layers, two, batch, heads, room, dim = shape
        each = batch // self.mesh.data
        room += -room % self._sharding.page_parts
        mine = [upload for upload in uploads if self._here(upload.row // each)]
        # The one transfer of the question: every device's part of whole rounds, all rows together.
        wanted = [self._parts_of(upload.upper, upload.row // each) for upload in mine]
        there = jax.device_put(*zip(*wanted, strict=True)) if mine else ()
        quantised = uploads[0].upper.k_scale is not None
        size = layers, two, each, heads, room, dim
        staged: dict[int, StagingBuffer] = {
            index: programs.stage_of(self._row(index), self._sharding, size, dtype, quantised)()
            for index in filter(self._here, range(self.mesh.data))
        }
        for (row, _, offset), upper in zip(mine, there, strict=True):
            index = row // each
            given = staged[index], upper, np.int32(row % each), alike(offset)
            staged[index] = programs.place_round(*given, mesh=self._row(index), sharding=self._sharding)
        shape = layers, two, batch, heads, room, dim
        shapes = jax.eval_shape(lambda: empty_stage(shape, dtype, quantised))
        return self._joined(list(staged.values()), shapes, stage_specs(self._sharding, quantised))

    def _parts_of(self, upper: UpperRows, index: int) -> tuple[UpperRows, UpperRows]:
        """A round whose slots the devices divide, and where its parts go on a row of the mesh."""
        short = -upper.kv.shape[3] % self._sharding.page_parts
        if short:
            # From another mesh, or one device.
            def longer(x: jax.Array | None, axis: int) -> Any:
                return None if x is None else np.pad(np.asarray(x), [(0, short * (i == axis)) for i in range(x.ndim)])

            upper = dataclasses.replace(upper, kv=longer(upper.kv, 3), v_scale=longer(upper.v_scale, 2))
        where = on_mesh(self._row(index), round_specs(self._sharding, upper.k_scale is not None))
        return sendable(upper, where), where

    def cut(self, cache: Cache, below: int, cuts: Sequence[RoundSlice]) -> list[UpperRows]:
        part = Partition(self.mesh, self.config, cache.policy)
        upper = part.local(cache)
        upper = upper.replace(layers=upper.layers[below:])
        each = cache.batch // self.mesh.data
        views: dict[int, Cache] = {}
        found = []
        for row, start, held, size in cuts:
            index = row // each
            size += -size % self._sharding.page_parts
            if not self._here(index):
                found.append(self._elsewhere(upper.pools[0], len(upper.layers), index, size))
                continue
            if index not in views:
                views[index] = self._view(upper, cache_specs(upper), index)
            given = views[index], np.int32(row % each), start, held
            found.append(programs.cut_round(*given, mesh=self._row(index), sharding=self._sharding, size=size))
        return found

    def _elsewhere(self, pool: LayerCache, layers: int, index: int, size: int) -> UpperRows:
        """A round whose row is another process's: its shape, and where it is."""
        heads, dim, quantised = self.config.num_kv_heads, self.config.head_dim, pool.scales is not None
        kv: Any = jax.ShapeDtypeStruct((layers, 2, heads, size, dim), pool.kv.dtype)
        scales: list[Any] = [jax.ShapeDtypeStruct((layers, heads, n), np.float32) for n in (dim, size)]
        shapes = UpperRows(kv, *scales) if quantised else UpperRows(kv)

        def array(shape: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.Array:
            host = where.with_memory_kind(HOST)
            return jax.make_array_from_single_device_arrays(shape.shape, host, [], dtype=shape.dtype)

        return jax.tree.map(array, shapes, on_mesh(self._row(index), round_specs(self._sharding, quantised)))

    # --- a round's end ----------------------------------------------------------------------------------------

    def compress(
        self,
        params: Decoder,
        cache: Cache,
        base: np.ndarray,
        rows: Sequence[np.ndarray],
        *,
        inner: Policy,
        size: int,
    ) -> Cache:
        part = Partition(self.mesh, self.config, cache.policy)
        slots = put_rows(self.mesh, base, spec=slots_spec(self._sharding))
        given = *detach(cache), *slots, *put_rows(self.mesh, *rows)
        return attach(*programs.compress(params, *given, part=part, inner=inner, size=size))

    def delete(self, cache: Cache, keep: Bool[np.ndarray, "L B H C"]) -> Cache:
        part = Partition(self.mesh, self.config, cache.policy)
        (mask,) = put_rows(self.mesh, keep, spec=slots_spec(self._sharding))
        return attach(*programs.delete(*detach(cache), mask, part=part))

    # --- rows of the mesh -------------------------------------------------------------------------------------

    def _view(self, tree: Any, specs: Any, index: int) -> Any:
        """What a row of the mesh has of arrays of all devices, without a copy."""
        row = self._row(index).jax

        def view(x: jax.Array, spec: PartitionSpec) -> jax.Array:
            x = jax.device_put(x, NamedSharding(self.mesh.jax, spec))
            there = {shard.device: shard.data for shard in x.addressable_shards}
            shape = x.shape[0] // self.mesh.data, *x.shape[1:]
            arrays = [there[device] for device in row.devices.flat]
            return jax.make_array_from_single_device_arrays(shape, NamedSharding(row, spec), arrays)

        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, list(map(view, leaves, leaves_of(specs))))

    def _joined(self, rows: Sequence[Any], shapes: Any, specs: Any) -> Any:
        """Undo :meth:`_view`: arrays of all devices out of those of every row that is here."""
        flat, structure = jax.tree.flatten(shapes)
        leaves = [jax.tree.leaves(row) for row in rows]

        def joined(i: int, spec: PartitionSpec) -> jax.Array:
            arrays = [shard.data for row in leaves for shard in row[i].addressable_shards]
            where = NamedSharding(self.mesh.jax, spec)
            return jax.make_array_from_single_device_arrays(flat[i].shape, where, arrays, dtype=flat[i].dtype)

        return jax.tree.unflatten(structure, [joined(i, spec) for i, spec in enumerate(leaves_of(specs))])
