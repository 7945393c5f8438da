"""The compiled programs of a turn, each declared once; :class:`RoundPrograms` runs them on one device or on a mesh.

The layers of a batch are read by all devices at once, as every prefill is. A round belongs to one row of the batch, so
that rows select for themselves, and travels as one array in the host memory of the devices that its row is on: one
device, or a row of the mesh. There KV heads are divided as those of the pools are; where devices share a head, each has
a block of its slots, and the blocks are joined on the devices, never on the host. So a question's transfer is divided
by the model axis whatever the heads are, and no device moves what another one needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.buckets import NEW_TOKENS
from kvjax.cache.cache import Cache
from kvjax.cache.host_memory import HOST, as_numpy, sendable
from kvjax.cache.pool import LayerCache
from kvjax.cache.quantisation import Storage
from kvjax.committed import committed, put_beside
from kvjax.errors import UsageError
from kvjax.model.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.policies.split_cache import SplitCache
from kvjax.rounds.conversation import Conversation, UpperRows
from kvjax.rounds.round_compression import compressed, without_slots
from kvjax.rounds.steps import StagingBuffer, cut, empty_stage, pages_onto, place, read_lower, read_upper
from kvjax.runtime.programs import Programs, ProgramSet
from kvjax.sharding.compile import ROW, Device, Named, Program, device_of, shardings_of, specs_of
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.partition import Partition
from pallas_kernels import dispatch

#: Axes of numbers by layer, batch row and KV head; by batch row and KV head; and, of one row, by layer and KV head.
_BY_ROW_AND_HEAD, _ROW_AND_HEAD, _BY_HEAD = (None, "batch", "kv_head"), ("batch", "kv_head"), (None, "kv_head")


class RoundUpload(NamedTuple):
    """A round on its way to the device: the batch row that sees it, and its first slot there by layer and head."""

    row: int
    upper: UpperRows
    offset: Int[np.ndarray, "L H"]


class RoundSlice(NamedTuple):
    """A round to be copied out of a cache: its batch row, first slot and slots held by layer and head."""

    row: int
    start: Int[np.ndarray, "L H"]
    held: Int[np.ndarray, "L H"]
    size: int


# --- the programs -------------------------------------------------------------------------------------------------


def _upper_layers(device: Device, batch: int, dtype: Any, storage: Storage) -> Cache:
    policy = device.policy
    assert isinstance(policy, SplitCache)
    # The capacity of the layers below, which are not made here, would only be one more thing to compile for.
    cache = device.empty(batch, policy.upper_capacity, NEW_TOKENS, dtype, storage)
    return cache.replace(layers=cache.layers[policy.watershed :])


def lower_onto(
    device: Device,
    params: Decoder,
    cache: Cache,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    *,
    capacity: int,
) -> tuple[Cache, Float[Array, "B T M"], Named]:
    """Read later questions; also their attention [B, H, C] to the slots of the last of these layers."""
    pages = pages_onto(device.local_config, cache, capacity)
    cache, x, mass = read_lower(params, cache, tokens, count, pages)
    return cache.replace(prompt_capacity=capacity, new_capacity=NEW_TOKENS), x, Named(mass, _ROW_AND_HEAD)


def upper(
    device: Device,
    params: Decoder,
    x: Float[Array, "B T M"],
    seen: Int[Array, " B"],
    count: Int[Array, " B"],
    staged: StagingBuffer,
    length: Named,
    *,
    dtype: Any,
    storage: Storage,
) -> tuple[Cache, Float[Array, "B V"]]:
    """:func:`kvjax.rounds.steps.read_upper`; the layers as a cache, whose counters mean nothing."""
    empty = _upper_layers(device, x.shape[0], dtype, storage)
    layers, logits = read_upper(params, empty.layers, x, seen, count, staged, length.values)
    return empty.replace(layers=layers), logits


def compress(
    device: Device,
    params: Decoder,
    cache: Cache,
    base: Named,
    *rows: Int[Array, "B ..."],
    inner: Policy,
    size: int,
) -> Cache:
    """:func:`kvjax.rounds.round_compression.compressed`."""
    return compressed(params, cache, base.values, *rows, inner=inner, size=size)


def delete(device: Device, cache: Cache, keep: Named) -> Cache:
    """:func:`kvjax.rounds.round_compression.without_slots`."""
    return without_slots(cache, keep.values)


def place_round(
    device: Device, staged: StagingBuffer, part: UpperRows, row: Int[Array, ""], offset: Named
) -> StagingBuffer:
    """:func:`kvjax.rounds.steps.place`."""
    return place(device.head_sharding, staged, part, row, offset.values)


def cut_round(device: Device, cache: Cache, row: Int[Array, ""], start: Named, held: Named, *, size: int) -> UpperRows:
    """:func:`kvjax.rounds.steps.cut` of all layers of a cache."""
    return cut(cache.layers, row, start.values, held.values, size)  # pyright: ignore[reportArgumentType]


def _round_like(cache: Cache) -> UpperRows:
    quantised = cache.pools[0].scales is not None
    return UpperRows(*[ROW] * 3) if quantised else UpperRows(ROW)  # type: ignore[arg-type]


_KINDS = ("dtype", "storage")
LOWER_ONTO = Program(
    lower_onto, lambda device, given, static: (given[1], ROW, Named(ROW, _ROW_AND_HEAD)), ("capacity",), (1,)
)
UPPER = Program(
    upper,
    lambda device, given, static: (jax.eval_shape(lambda: _upper_layers(device, given[1].shape[0], **static)), ROW),
    _KINDS,
)
COMPRESS = Program(compress, lambda device, given, static: given[1], ("inner", "size"), (1,))
DELETE = Program(delete, lambda device, given, static: given[0])
PLACE_ROUND = Program(place_round, lambda device, given, static: given[0], donates=(0,))
CUT_ROUND = Program(cut_round, lambda device, given, static: _round_like(given[0]), ("size",))


# --- running them -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RoundPrograms(ProgramSet):
    """The programs of a later question and of a round's end; a first question is read as every prompt is.

    Arrays of rows are NumPy's, B as :meth:`rows` says.

    Raises:
      UsageError: the devices of one row of the mesh belong to several processes.
    """

    def __post_init__(self) -> None:
        if self.mesh is None:
            return
        if any(len({device.process_index for device in row}) > 1 for row in self._grid):
            raise UsageError(
                "RoundAttention keeps a row's rounds in the memory of one host; make the model axis no longer than "
                "the devices of a process."
            )

    @property
    def of_tokens(self) -> Programs:
        """The programs that read a prompt, as many rows as here."""
        return Programs(self.mesh, self.config, self.exact)

    def check(self, conversation: Conversation) -> None:
        """Refuse (UsageError) a batch of conversations that cannot go on here."""
        if self.mesh is None:
            return
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

    def lower_onto(
        self, params: Decoder, cache: Cache, tokens: np.ndarray, count: np.ndarray, *, capacity: int, consume: bool
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Read later questions; also their attention [B, H, C] to the slots of the last of these layers.

        ``capacity`` is for what rows hold afterwards; ``consume`` donates the cache given.
        """
        device = self.device(cache.policy, params.config)
        pages = pages_onto(device.local_config, device.local(cache), capacity)
        given = (device, params, cache, tokens, count)
        cache, x, mass = LOWER_ONTO.onto(*given, cache=cache, pages=pages, consume=consume, capacity=capacity)
        return cache, x, mass.values

    def upper(
        self,
        params: Decoder,
        x: jax.Array,
        seen: np.ndarray,
        count: np.ndarray,
        staged: StagingBuffer,
        length: np.ndarray,
        *,
        policy: SplitCache,
        dtype: Any,
        storage: Storage,
    ) -> tuple[tuple[LayerCache, ...], jax.Array]:
        """Finish reading a later question above the watershed: :func:`kvjax.rounds.steps.read_upper`."""
        slots = Named(length, _BY_ROW_AND_HEAD)
        device = self.device(policy, params.config)
        cache, logits = UPPER(device, params, x, seen, count, staged, slots, dtype=dtype, storage=storage)
        return cache.layers, logits  # pyright: ignore[reportReturnType]

    # --- rounds, of one row each ------------------------------------------------------------------------------

    def stage(
        self, uploads: Sequence[RoundUpload], shape: tuple[int, ...], dtype: Any, beside: jax.Array
    ) -> StagingBuffer:
        """Bring rounds to the device, all in one transfer, and place them in a buffer of ``shape``.

        One device is that of ``beside``; a mesh knows its own.
        """
        layers, two, batch, heads, slots, dim = shape
        each = batch // self._parts
        quantised = uploads[0].upper.k_scale is not None
        local = [self._row_device(index) for index in range(self._parts)]
        if self.mesh is not None:
            slots += -slots % local[0].head_sharding.page_parts
        mine = [upload for upload in uploads if self._here(upload.row // each)]
        # The one transfer of the question: every device's part of whole rounds, all rows together.
        wanted = [_to_send(upload.upper, local[upload.row // each], beside) for upload in mine]
        there = jax.device_put(*zip(*wanted, strict=True)) if mine else ()
        staged = {
            index: _empty_stage(device, (layers, two, each, heads, slots, dim), dtype, quantised)
            for index, device in enumerate(local)
            if self._here(index)
        }
        for (row, _, offset), part in zip(mine, there, strict=True):
            index = row // each
            given = staged[index], part, np.int32(row % each), _named_offset(offset)
            staged[index] = PLACE_ROUND(local[index], *given)
        if self.mesh is None:
            return staged[0]
        whole = layers, two, batch, heads, slots, dim
        return self._joined(list(staged.values()), jax.eval_shape(lambda: empty_stage(whole, dtype, quantised)))

    def cut(self, cache: Cache, below: int, cuts: Sequence[RoundSlice]) -> list[UpperRows]:
        """Copy rounds out of layers ``below ..``: :func:`kvjax.rounds.steps.cut`, for every one of ``cuts``.

        Where the device's memory is the host's, NumPy copies them, and no program is compiled for every shape.
        """
        if self.cuts_on_host:
            layers = jax.tree.map(as_numpy, cache.layers[below:])
            beside = jax.tree.leaves(cache.layers[below].kv)[0]
            found = [cut(layers, one.row, one.start, one.held, one.size) for one in cuts]
            return [put_beside(beside, upper) for upper in found]
        # Without what says how much room there is, for which the program need not be compiled again.
        above = cache.replace(layers=cache.layers[below:], policy=SplitCache(below), prompt_capacity=0, new_capacity=0)
        each = cache.batch // self._parts
        views: dict[int, Cache] = {}
        found = []
        for row, start, held, size in cuts:
            index = row // each
            device = self._row_device(index, above.policy)
            size += -size % device.head_sharding.page_parts
            if not self._here(index):
                found.append(_elsewhere(device, above, size))
                continue
            if index not in views:
                views[index] = above if self.mesh is None else self._view(above, index)
            edges = Named(start, _BY_HEAD), Named(held, _BY_HEAD)
            found.append(CUT_ROUND(device, views[index], np.int32(row % each), *edges, size=size))
        return found

    @property
    def cuts_on_host(self) -> bool:
        """Whether :meth:`cut` needs no program."""
        return self.mesh is None and dispatch.platform() == "cpu"

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
        """:func:`kvjax.rounds.round_compression.compressed`, whose arrays of rows are ``rows``; consumes the cache."""
        device = self.device(cache.policy, params.config)
        return COMPRESS(device, params, cache, Named(base, _BY_ROW_AND_HEAD), *rows, inner=inner, size=size)

    def delete(self, cache: Cache, keep: Bool[np.ndarray, "L B H C"]) -> Cache:
        """The cache with only these slots of every layer, in order; positions stay."""
        return DELETE(self.device(cache.policy, self.config), cache, Named(keep, _BY_ROW_AND_HEAD))

    # --- rows of the mesh -------------------------------------------------------------------------------------

    @property
    def _parts(self) -> int:
        """Rows of the mesh."""
        return 1 if self.mesh is None else self.mesh.data

    @property
    def _grid(self) -> np.ndarray:
        """[data, model] devices."""
        assert self.mesh is not None
        return self.mesh.jax.devices.reshape(self.mesh.data, -1)

    def _row_device(self, index: int, policy: Policy | None = None) -> Device:
        """A row of the mesh as a mesh of its own; without a mesh, the device."""
        own = None if self.mesh is None else Mesh(1, self.mesh.model, tuple(self._grid[index]))
        return device_of(own, self.config, policy)  # pyright: ignore[reportArgumentType]

    def _here(self, index: int) -> bool:
        """Whether that row's devices are this process's."""
        return self.mesh is None or self._grid[index, 0].process_index == jax.process_index()

    def _view(self, cache: Cache, index: int) -> Cache:
        """The shards that one row of the mesh holds of a cache, without a copy."""
        row = self._row_device(index).mesh
        assert self.mesh is not None and row is not None
        mesh = self.mesh

        def view(x: jax.Array, spec: Any) -> jax.Array:
            x = jax.device_put(x, NamedSharding(mesh.jax, spec))
            there = {shard.device: shard.data for shard in x.addressable_shards}
            shape = x.shape[0] // mesh.data, *x.shape[1:]
            arrays = [there[device] for device in row.jax.devices.flat]
            return jax.make_array_from_single_device_arrays(shape, NamedSharding(row.jax, spec), arrays)

        leaves, structure = jax.tree.flatten(cache)
        specs = specs_of(cache, self.device(cache.policy))
        return jax.tree.unflatten(structure, list(map(view, leaves, specs)))

    def _joined(self, rows: Sequence[StagingBuffer], shapes: StagingBuffer) -> StagingBuffer:
        """Buffers of all devices out of those of every row of the mesh that is here."""
        device = self.device(None)  # type: ignore[arg-type]
        assert isinstance(device, Partition)

        def joined(shape: Any, where: NamedSharding, *parts: jax.Array) -> jax.Array:
            arrays = [shard.data for part in parts for shard in part.addressable_shards]
            return jax.make_array_from_single_device_arrays(shape.shape, where, arrays, dtype=shape.dtype)

        return jax.tree.map(joined, shapes, shardings_of(shapes, device), *rows)


ONE_DEVICE = RoundPrograms()


def _named_offset(offset: Int[np.ndarray, "L H"]) -> Named:
    """One offset [1, 1] where all layers and heads have the same."""
    return Named(offset[:1, :1], ()) if (offset == offset[0, 0]).all() else Named(offset, _BY_HEAD)


def _empty_stage(device: Device, shape: tuple[int, ...], dtype: Any, quantised: bool) -> StagingBuffer:
    if not isinstance(device, Partition):
        return committed(empty_stage(shape, dtype, quantised))
    like = jax.eval_shape(lambda: empty_stage(shape, dtype, quantised))
    return jax.tree.map(lambda x, where: jnp.zeros(x.shape, x.dtype, device=where), like, shardings_of(like, device))


def _to_send(part: UpperRows, device: Device, beside: jax.Array) -> tuple[UpperRows, Any]:
    """A round whose slots the devices divide, and where its arrays go."""
    if not isinstance(device, Partition):
        where = jax.tree.map(lambda _: beside.sharding, part)
        return sendable(part, where), where
    short = -part.kv.shape[3] % device.head_sharding.page_parts
    if short:
        # From another mesh, or one device.
        def longer(x: jax.Array | None, axis: int) -> Any:
            return None if x is None else np.pad(np.asarray(x), [(0, short * (i == axis)) for i in range(x.ndim)])

        part = dataclasses.replace(part, kv=longer(part.kv, 3), v_scale=longer(part.v_scale, 2))
    where = shardings_of(part, device)
    return sendable(part, where), where


def _elsewhere(device: Device, cache: Cache, size: int) -> UpperRows:
    """A round whose row is another process's: its shape, and where it is."""
    assert isinstance(device, Partition)
    pool, layers = cache.pools[0], len(cache.layers)
    heads, dim = device.config.num_kv_heads, device.config.head_dim
    kv: Any = jax.ShapeDtypeStruct((layers, 2, heads, size, dim), pool.kv.dtype)
    scales: list[Any] = [jax.ShapeDtypeStruct((layers, heads, n), np.float32) for n in (dim, size)]
    shapes = UpperRows(kv, *scales) if pool.scales is not None else UpperRows(kv)

    def array(shape: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.Array:
        host = where.with_memory_kind(HOST)
        return jax.make_array_from_single_device_arrays(shape.shape, host, [], dtype=shape.dtype)

    return jax.tree.map(array, shapes, shardings_of(shapes, device))
