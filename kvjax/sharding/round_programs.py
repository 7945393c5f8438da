"""The compiled programs of Round Attention on a mesh: ``kvjax/rounds/steps.py``, run by every device."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.buckets import NEW_TOKENS
from kvjax.cache.cache import Cache, Pools, attach, detach
from kvjax.cache.page_sharding import PageSharding
from kvjax.cache.quantisation import Storage
from kvjax.model.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.policies.split_cache import SplitCache
from kvjax.rounds.conversation import UpperRows
from kvjax.rounds.inner import compressed, without_slots
from kvjax.rounds.steps import StagingBuffer, cut, empty_stage, pages_onto, place, read_lower, read_upper
from kvjax.sharding.decoder import local_decoder
from kvjax.sharding.mesh import Mesh
from kvjax.sharding.partition import Partition, head_sharding
from kvjax.sharding.placement import ROWS, cache_specs, leaves_of, weight_specs
from kvjax.sharding.programs import on_devices

_EVERYWHERE = PartitionSpec()


def slots_spec(sharding: PageSharding) -> PartitionSpec:
    """Of numbers [L, B, H, ...]."""
    return PartitionSpec(None, "data", sharding.head_axes or None)


def stage_specs(sharding: PageSharding, quantised: bool) -> StagingBuffer:
    """Of staged rounds: heads as they are dealt, and blocks of slots where devices share them."""
    kv = PartitionSpec(None, None, "data", sharding.head_axes or None, sharding.page_axes or None)
    return StagingBuffer(kv, slots_spec(sharding) if quantised else None)  # pyright: ignore[reportArgumentType]


def round_specs(sharding: PageSharding, quantised: bool) -> UpperRows:
    """Of one row's round."""
    heads, slots = sharding.head_axes or None, sharding.page_axes or None
    kv: Any = PartitionSpec(None, None, heads, slots)
    if not quantised:
        return UpperRows(kv)
    scales: list[Any] = [PartitionSpec(None, heads), PartitionSpec(None, heads, slots)]
    return UpperRows(kv, *scales)


def on_mesh(mesh: Mesh, specs: Any) -> Any:
    """A tree of specs as shardings."""
    shardings = [NamedSharding(mesh.jax, spec) for spec in leaves_of(specs)]
    structure = jax.tree.structure(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return jax.tree.unflatten(structure, shardings)


def _empty(part: Partition, batch: int, room: int, dtype: Any, storage: Storage) -> Cache:
    """What one device holds of a batch's cache of all layers."""
    return part.empty(batch // part.mesh.data, room, NEW_TOKENS, dtype, storage)


def _split(cache: Cache) -> tuple[list[PartitionSpec], Any]:
    """Specs of a cache's pools, and of the rest."""
    pools, rest = detach(cache_specs(cache))
    return leaves_of(pools), rest


def _watershed(part: Partition) -> int:
    assert isinstance(part.policy, SplitCache)
    return part.policy.watershed


@functools.partial(jax.jit, static_argnames=("part", "room", "dtype", "storage"))
def lower_fresh(
    params: Decoder,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    *,
    part: Partition,
    room: int,
    dtype: Any,
    storage: Storage,
) -> tuple[Cache, Float[Array, "B T M"]]:
    """:meth:`kvjax.rounds.programs.RoundPrograms.lower_fresh`; the data axis divides B, here and below."""

    def empty() -> Cache:
        cache = _empty(part, tokens.shape[0], room, dtype, storage)
        return cache.replace(layers=cache.layers[: _watershed(part)])

    def run(params: Decoder, tokens: Array, count: Array) -> tuple[Any, ...]:
        cache = empty()
        pages = tuple(layer.pages for layer in cache.layers)
        return read_lower(local_decoder(params, part), cache, tokens, count, pages, fresh=True)[:2]

    arguments = [(params, weight_specs(params, part.mesh)), (tokens, ROWS), (count, ROWS)]
    cache, x = on_devices(part.mesh, run, arguments, [cache_specs(jax.eval_shape(empty)), ROWS])
    return part.all(cache), x


def _onto(
    params: Decoder,
    pools: Pools,
    rest: Cache,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    *,
    part: Partition,
    room: int,
) -> tuple[Pools, Cache, Float[Array, "B T M"], Float[Array, "B H C"]]:
    pool_specs, rest_specs = _split(attach(pools, rest))

    def run(params: Decoder, pools: Pools, rest: Cache, tokens: Array, count: Array) -> tuple[Any, ...]:
        cache = attach(pools, rest)
        pages = pages_onto(part.config_of(0), cache, room)
        cache, x, mass = read_lower(local_decoder(params, part), cache, tokens, count, pages, fresh=False)
        return *detach(cache.replace(prompt_capacity=room, new_capacity=NEW_TOKENS)), x, mass

    arguments = [
        (params, weight_specs(params, part.mesh)),
        (pools, pool_specs),
        (part.local(rest), rest_specs),
        (tokens, ROWS),
        (count, ROWS),
    ]
    mass_spec = PartitionSpec("data", head_sharding(part.mesh, part.config).head_axes or None)
    pools, rest, x, mass = on_devices(part.mesh, run, arguments, [pool_specs, rest_specs, ROWS, mass_spec])
    return pools, part.all(rest), x, mass


lower_onto = jax.jit(_onto, static_argnames=("part", "room"))
lower_onto_consuming = jax.jit(_onto, static_argnames=("part", "room"), donate_argnames=("pools",))


@functools.partial(jax.jit, static_argnames=("part", "dtype", "storage"))
def upper(
    params: Decoder,
    x: Float[Array, "B T M"],
    seen: Int[Array, " B"],
    count: Int[Array, " B"],
    staged: StagingBuffer | None,
    length: Int[Array, "L B H"] | None,
    *,
    part: Partition,
    dtype: Any,
    storage: Storage,
) -> tuple[Cache, Float[Array, "B V"]]:
    """:meth:`kvjax.rounds.programs.RoundPrograms.upper`; the layers as a cache, whose counters mean nothing."""
    sharding, placed = head_sharding(part.mesh, part.config), part.policy
    assert isinstance(placed, SplitCache)

    def empty() -> Cache:
        cache = _empty(part, x.shape[0], placed.upper_capacity, dtype, storage)
        return cache.replace(layers=cache.layers[placed.watershed :])

    def run(params: Decoder, *read: Any) -> tuple[Any, ...]:
        cache = empty()
        layers, logits = read_upper(local_decoder(params, part), cache.layers, *read)
        return cache.replace(layers=layers), logits

    quantised = staged is not None and staged.k_scale is not None
    arguments = [
        (params, weight_specs(params, part.mesh)),
        (x, ROWS),
        (seen, ROWS),
        (count, ROWS),
        (staged, [] if staged is None else stage_specs(sharding, quantised)),
        (length, [] if length is None else slots_spec(sharding)),
    ]
    cache, logits = on_devices(part.mesh, run, arguments, [cache_specs(jax.eval_shape(empty)), ROWS])
    return part.all(cache), logits


# --- of one row of the mesh -----------------------------------------------------------------------------------


@functools.cache
def stage_of(mesh: Mesh, sharding: PageSharding, shape: tuple[int, ...], dtype: Any, quantised: bool) -> Any:
    """A program that makes an empty stage of a row of the mesh."""
    make = functools.partial(empty_stage, shape, dtype, quantised)
    return jax.jit(make, out_shardings=on_mesh(mesh, stage_specs(sharding, quantised)))


@functools.partial(jax.jit, static_argnames=("mesh", "sharding"), donate_argnames=("staged",))
def place_round(
    staged: StagingBuffer,
    part: UpperRows,
    row: Int[Array, ""],
    offset: Int[Array, "#L #H"],
    *,
    mesh: Mesh,
    sharding: PageSharding,
) -> StagingBuffer:
    """:func:`kvjax.rounds.steps.place`."""
    quantised = staged.k_scale is not None
    specs = stage_specs(sharding, quantised)

    def run(*given: Any) -> tuple[StagingBuffer, ...]:
        return (place(sharding, *given),)

    where = _EVERYWHERE if offset.shape == (1, 1) else PartitionSpec(None, sharding.head_axes or None)
    arguments = [(staged, specs), (part, round_specs(sharding, quantised)), (row, _EVERYWHERE), (offset, where)]
    return on_devices(mesh, run, arguments, [specs])[0]


@functools.partial(jax.jit, static_argnames=("mesh", "sharding", "size"))
def cut_round(
    cache: Cache,
    row: Int[Array, ""],
    start: Int[Array, "L H"],
    held: Int[Array, "L H"],
    *,
    mesh: Mesh,
    sharding: PageSharding,
    size: int,
) -> UpperRows:
    """:func:`kvjax.rounds.steps.cut` of the cache's layers, which is labelled as one device sees it."""
    where = PartitionSpec(None, sharding.head_axes or None)

    def run(cache: Cache, row: Array, start: Array, held: Array) -> tuple[UpperRows, ...]:
        return (cut(cache.layers, row, start, held, size),)  # pyright: ignore[reportArgumentType]

    quantised = cache.pools[0].scales is not None
    arguments = [(cache, cache_specs(cache)), (row, _EVERYWHERE), (start, where), (held, where)]
    return on_devices(mesh, run, arguments, [round_specs(sharding, quantised)])[0]


# --- a round's end --------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("part", "inner", "size"), donate_argnames=("pools",))
def compress(
    params: Decoder,
    pools: Pools,
    rest: Cache,
    base: Int[Array, "L B H"],
    *given: Array,
    part: Partition,
    inner: Policy,
    size: int,
) -> tuple[Pools, Cache]:
    """:func:`kvjax.rounds.inner.compressed`."""
    pool_specs, rest_specs = _split(attach(pools, rest))

    def run(params: Decoder, pools: Pools, rest: Cache, *given: Array) -> tuple[Any, ...]:
        local = local_decoder(params, part)
        return detach(compressed(local, attach(pools, rest), *given, inner=inner, size=size))

    arguments = [
        (params, weight_specs(params, part.mesh)),
        (pools, pool_specs),
        (part.local(rest), rest_specs),
        (base, slots_spec(head_sharding(part.mesh, part.config))),
        *((x, ROWS) for x in given),
    ]
    pools, rest = on_devices(part.mesh, run, arguments, [pool_specs, rest_specs])
    return pools, part.all(rest)


@functools.partial(jax.jit, static_argnames=("part",))
def delete(pools: Pools, rest: Cache, keep: Bool[Array, "L B H C"], *, part: Partition) -> tuple[Pools, Cache]:
    """:func:`kvjax.rounds.inner.without_slots`."""
    pool_specs, rest_specs = _split(attach(pools, rest))

    def run(pools: Pools, rest: Cache, keep: Array) -> tuple[Any, ...]:
        return detach(without_slots(attach(pools, rest), keep))

    arguments = [
        (pools, pool_specs),
        (part.local(rest), rest_specs),
        (keep, slots_spec(head_sharding(part.mesh, part.config))),
    ]
    pools, rest = on_devices(part.mesh, run, arguments, [pool_specs, rest_specs])
    return pools, part.all(rest)
