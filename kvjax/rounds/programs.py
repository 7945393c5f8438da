"""The compiled programs of a turn, on one device or (``kvjax/sharding/rounds.py``) on a mesh.

A round travels as one array of each row, so that rows select for themselves; everything else is done for all rows of a
batch at once. On a mesh the rows that its data axis gives to some devices have their rounds in those devices' host
memory, each device its own heads, or its block of every head's slots.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.buckets import NEW_TOKENS
from kvjax.cache.cache import Cache, Pools, attach, detach
from kvjax.cache.host_memory import committed, sendable
from kvjax.cache.page_sharding import UNSHARDED
from kvjax.cache.pool import LayerCache
from kvjax.cache.quantisation import Storage
from kvjax.model.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.policies.split_cache import SplitCache
from kvjax.rounds.conversation import Conversation, UpperRows
from kvjax.rounds.inner import compressed, without_slots
from kvjax.rounds.steps import StagingBuffer, cut, empty_stage, pages_onto, place, read_lower, read_upper
from kvjax.runtime.prefill import Pages, empty_cache
from kvjax.sharding.mesh import Mesh


class RoundUpload(NamedTuple):
    """A round on its way to the device: the row that sees it, and its first slot there by layer and head."""

    row: int
    upper: UpperRows
    offset: Int[np.ndarray, "L H"]


class RoundSlice(NamedTuple):
    """A round to be cut out of a cache: its row, its first slot and how many it holds by layer and head."""

    row: int
    start: Int[np.ndarray, "L H"]
    held: Int[np.ndarray, "L H"]
    size: int


@runtime_checkable
class RoundPrograms(Protocol):
    """What a turn calls; arrays of rows are NumPy's, B as :meth:`rows` says.

    Attributes:
      mesh: the devices, or None for one.
    """

    @property
    def mesh(self) -> Mesh | None: ...

    def rows(self, batch: int) -> int:
        """Rows to run for ``batch`` of them; the others are padding."""
        ...

    def check(self, conversation: Conversation) -> None:
        """Refuse (UsageError) a batch of conversations that cannot go on here."""
        ...

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
        """Read first questions below the watershed: those layers' cache, and what the next layer reads."""
        ...

    def lower_onto(
        self, params: Decoder, cache: Cache, tokens: np.ndarray, count: np.ndarray, *, room: int, consume: bool
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Read later questions; also their attention [B, H, C] to the slots of the last of these layers.

        ``room`` is for what rows hold afterwards; ``consume`` donates the cache given.
        """
        ...

    def stage(
        self, uploads: Sequence[RoundUpload], shape: tuple[int, ...], dtype: Any, beside: jax.Array
    ) -> StagingBuffer:
        """Bring rounds to the device, all in one transfer, and place them in an array of ``shape``.

        One device is that of ``beside``; a mesh knows its own.
        """
        ...

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
        """:func:`kvjax.rounds.steps.read_upper`."""
        ...

    def cut(self, cache: Cache, below: int, cuts: Sequence[RoundSlice]) -> list[UpperRows]:
        """:func:`kvjax.rounds.steps.cut` of layers ``below ..``, for every one of ``cuts``."""
        ...

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
        """:func:`kvjax.rounds.inner.compressed`, whose arrays of rows are ``rows``; the cache given is donated."""
        ...

    def delete(self, cache: Cache, keep: Bool[np.ndarray, "L B H C"]) -> Cache:
        """The cache with only these slots of every layer, in order; positions stay."""
        ...


class OneDevice:
    """The programs of one device."""

    mesh: Mesh | None = None

    def rows(self, batch: int) -> int:
        return batch

    def check(self, conversation: Conversation) -> None:
        """Any can."""

    def lower_fresh(
        self, params: Decoder, tokens: np.ndarray, count: np.ndarray, **options: Any
    ) -> tuple[Cache, jax.Array]:
        return committed(_lower_fresh(params, jnp.asarray(tokens), jnp.asarray(count), **options))

    def lower_onto(
        self, params: Decoder, cache: Cache, tokens: np.ndarray, count: np.ndarray, *, room: int, consume: bool
    ) -> tuple[Cache, jax.Array, jax.Array]:
        old, rest = detach(cache)
        pages = pages_onto(params.config, cache, room)
        reusable = pages == tuple(layer.pages for layer in cache.layers)
        run = _lower_onto_consuming if consume and reusable else _lower_onto
        pools, rest, x, mass = run(params, old, rest, jnp.asarray(tokens), jnp.asarray(count), pages=pages, room=room)
        if consume and not reusable:
            jax.tree.map(lambda pool: pool.delete(), old)
        return attach(pools, rest), x, mass

    def stage(
        self, uploads: Sequence[RoundUpload], shape: tuple[int, ...], dtype: Any, beside: jax.Array
    ) -> StagingBuffer:
        there = jax.device_put(sendable([upload.upper for upload in uploads], beside.sharding), beside.sharding)
        staged = committed(empty_stage(shape, dtype, uploads[0].upper.k_scale is not None))
        for (row, _, offset), upper in zip(uploads, there, strict=True):
            staged = _place(staged, upper, np.int32(row), alike(offset))
        return staged

    def upper(
        self,
        params: Decoder,
        x: jax.Array,
        seen: np.ndarray,
        count: np.ndarray,
        staged: StagingBuffer | None,
        length: np.ndarray | None,
        **options: Any,
    ) -> tuple[tuple[LayerCache, ...], jax.Array]:
        slots = None if length is None else jnp.asarray(length)
        return _upper(params, x, jnp.asarray(seen), jnp.asarray(count), staged, slots, **options)

    def cut(self, cache: Cache, below: int, cuts: Sequence[RoundSlice]) -> list[UpperRows]:
        layers = tuple(cache.layers[below:])
        return [_cut(layers, np.int32(row), start, held, size=size) for row, start, held, size in cuts]

    def compress(
        self, params: Decoder, cache: Cache, base: np.ndarray, rows: Sequence[np.ndarray], *, inner: Policy, size: int
    ) -> Cache:
        given = map(jnp.asarray, (base, *rows))
        return attach(*_compress(params, *detach(cache), *given, inner=inner, size=size))

    def delete(self, cache: Cache, keep: Bool[np.ndarray, "L B H C"]) -> Cache:
        return attach(*_delete(*detach(cache), jnp.asarray(keep)))


ONE_DEVICE = OneDevice()


def alike(offset: Int[np.ndarray, "L H"]) -> Int[np.ndarray, "#L #H"]:
    """One offset [1, 1] where all layers and heads have the same."""
    return offset[:1, :1] if (offset == offset[0, 0]).all() else offset


@functools.partial(jax.jit, static_argnames=("policy", "room", "dtype", "storage"))
def _lower_fresh(
    params: Decoder,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    *,
    policy: SplitCache,
    room: int,
    dtype: Any,
    storage: Storage,
) -> tuple[Cache, Float[Array, "B T M"]]:
    cache = empty_cache(params.config, policy, tokens.shape[0], room, NEW_TOKENS, dtype, storage)
    cache = cache.replace(layers=cache.layers[: policy.watershed])
    pages = tuple(layer.pages for layer in cache.layers)
    return read_lower(params, cache, tokens, count, pages, fresh=True)[:2]


def _onto(
    params: Decoder,
    pools: Pools,
    rest: Cache,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    *,
    pages: Pages,
    room: int,
) -> tuple[Pools, Cache, Float[Array, "B T M"], Float[Array, "B H C"]]:
    cache, x, mass = read_lower(params, attach(pools, rest), tokens, count, pages, fresh=False)
    assert mass is not None
    return *detach(cache.replace(prompt_capacity=room, new_capacity=NEW_TOKENS)), x, mass


_lower_onto = jax.jit(_onto, static_argnames=("pages", "room"))
_lower_onto_consuming = jax.jit(_onto, static_argnames=("pages", "room"), donate_argnames=("pools",))


@functools.partial(jax.jit, donate_argnames=("staged",))
def _place(staged: StagingBuffer, part: UpperRows, row: Int[Array, ""], offset: Int[Array, "#L #H"]) -> StagingBuffer:
    return place(UNSHARDED, staged, part, row, offset)


@functools.partial(jax.jit, static_argnames=("policy", "dtype", "storage"))
def _upper(
    params: Decoder,
    x: Float[Array, "B T M"],
    seen: Int[Array, " B"],
    count: Int[Array, " B"],
    staged: StagingBuffer | None,
    length: Int[Array, "L B H"] | None,
    *,
    policy: SplitCache,
    dtype: Any,
    storage: Storage,
) -> tuple[tuple[LayerCache, ...], Float[Array, "B V"]]:
    # The room of the layers below, which are not made here, would only be one more thing to compile for.
    empty = empty_cache(params.config, policy, x.shape[0], policy.upper_capacity, NEW_TOKENS, dtype, storage)
    return read_upper(params, empty.layers[policy.watershed :], x, seen, count, staged, length)


_cut = functools.partial(jax.jit, static_argnames=("size",))(cut)


@functools.partial(jax.jit, static_argnames=("inner", "size"), donate_argnames=("pools",))
def _compress(
    params: Decoder, pools: Pools, rest: Cache, *given: Array, inner: Policy, size: int
) -> tuple[Pools, Cache]:
    return detach(compressed(params, attach(pools, rest), *given, inner=inner, size=size))


@jax.jit
def _delete(pools: Pools, rest: Cache, keep: Bool[Array, "L B H C"]) -> tuple[Pools, Cache]:
    return detach(without_slots(attach(pools, rest), keep))
