"""The one interface of what a later turn can continue: a :class:`Cache`, or a conversation of rounds.

Whoever continues, joins, moves or saves one goes by this interface; nothing else asks which of the two it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import jax
from jaxtyping import Array, Int

from kvjax.cache.cache import Cache, take
from kvjax.cache.groups import parts, with_parts
from kvjax.cache.quantisation import Storage
from kvjax.errors import UsageError, kind_of


@runtime_checkable
class Continuation(Protocol):
    """A batch of rows as the last turn left them: a value, unless a turn consumes it.

    Attributes:
      batch: rows. seen: [B] tokens each row has been through. next_token: [B] generated but not yet read, or
        negative: see :class:`kvjax.cache.cache.Cache`.
      policy: which tokens stay, or which rounds a question sees.
      storage: how its keys and values are stored.
      model_shape: layers, KV heads and channels of the model it belongs to.
      nbytes: allocated bytes; of a conversation those outside host memory.
      device_layers: the layers that are on the device between two turns; all of them, or those below the watershed.
    """

    @property
    def batch(self) -> int: ...
    @property
    def seen(self) -> Int[Array, " B"]: ...
    @property
    def next_token(self) -> Int[Array, " B"]: ...
    @property
    def policy(self) -> Any: ...
    @property
    def storage(self) -> Storage: ...
    @property
    def model_shape(self) -> tuple[int, int, int]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device_layers(self) -> Cache: ...

    def with_device_layers(self, cache: Cache) -> Self:
        """The same with other device layers."""
        ...

    def take(self, indices: Sequence[int]) -> Self:
        """Rows in the given order; a row may be taken several times. A copy, unless all rows stay."""
        ...

    def row(self, index: int) -> Self:
        """One row, batch 1."""
        ...

    def join(self, others: Sequence[Self]) -> Self:
        """Its rows and then those of others as one batch (UsageError where they do not belong together)."""
        ...

    def to_host(self) -> Self:
        """All of it in pinned host memory, for an idle user; the next turn brings it back."""
        ...

    def to_device(self) -> Self:
        """Ready for a turn."""
        ...


C = TypeVar("C", bound=Continuation)


def concatenate(caches: Sequence[C]) -> C:
    """One batch out of several caches, or out of several conversations of rounds, in order.

    They share model, policy and storage. Each head gets the largest of its allocations; rounds are shared with the
    conversations they come from, not copied. What is parked comes to the device.

    Raises:
      UsageError: there is none, caches and conversations are mixed, models, policies or storages differ, or a policy's
        own state depends on the allocation and the allocations differ.
    """
    if not isinstance(caches, Iterable):
        raise UsageError("concatenate takes a list of caches, and one cache was given; it is one batch already.")
    given = list(caches)
    if not given:
        raise UsageError("No cache was given to concatenate; give at least one.")
    check_continuable("concatenate", given)
    return one_batch([item.to_device() for item in given])


def one_batch(items: Sequence[C]) -> C:
    """The rows of what was checked and is on the device, as one batch."""
    return items[0] if len(items) == 1 else items[0].join(items[1:])


def check_continuable(asked: str, items: Sequence[Any], *, one: bool = False) -> None:
    """Refuse (UsageError) what is no cache, what was consumed, and caches mixed with conversations.

    Args:
      asked: what takes them, as the sentence names it. one: whether it takes no list.
    """
    for item in items:
        if not isinstance(item, Continuation):
            takes = "an output's cache" if one else "an output's cache or a list of them"
            raise UsageError(f"{asked} takes {takes}; {kind_of(item)} was given.")
        if is_consumed(item):
            raise UsageError("This cache was consumed by an earlier call; keep a cache by leaving consume_cache=False.")
    if len({type(item) for item in items}) > 1:
        raise UsageError("Caches and conversations of rounds cannot be one batch; continue these one by one instead.")


def is_row(item: Any) -> bool:
    """Whether it is one row that can be continued, and no list."""
    return isinstance(item, Continuation) and item.batch == 1


def is_consumed(item: Continuation) -> bool:
    """Whether its keys and values were donated."""
    return any(leaf.is_deleted() for leaf in keys_and_values(item))


def delete(item: Continuation) -> None:
    """Free the keys and values of its device layers; it cannot go on from here."""
    for leaf in keys_and_values(item):
        leaf.delete()


def are_apart(one: Continuation, other: Continuation) -> bool:
    """Whether the two share no keys and values, so that consuming one leaves the other whole."""
    return not {id(leaf) for leaf in keys_and_values(one)} & {id(leaf) for leaf in keys_and_values(other)}


def keys_and_values(item: Continuation) -> list[Any]:
    """The arrays of its device layers that a turn may consume."""
    return [leaf for pool in item.device_layers.pools for leaf in jax.tree.leaves(pool.kv)]


def may_be_lent(item: Continuation) -> bool:
    """Whether a turn that consumes it can be undone: its policy appends slots and never changes one.

    Keys of int8 are packed anew when larger ones come, so those slots do change.
    """
    cache = item.device_layers
    return cache.policy.only_appends and not cache.storage.quantised


def rolled_back(before: C, after: Cache) -> C:
    """The cache that a turn consumed, recovered from the one it had got to when it failed.

    Only where :func:`may_be_lent`: the slots are all still there, and the counters of ``before``, which no program
    consumes, say how many of them are its own.
    """
    if not is_consumed(before):
        return before
    old = before.device_layers
    after = take(after.replace(layers=after.layers[: len(old.layers)]), range(old.batch))
    layers = []
    for was, now in zip(old.layers, after.layers, strict=True):
        pools = []
        for one, other in zip(parts(was), parts(now), strict=True):
            pools.append(other.replace(length=one.length, next=one.next))
        layers.append(with_parts(now, pools))
    capacities = {name: getattr(after, name) for name in ("prompt_capacity", "new_capacity", "own_capacity")}
    return before.with_device_layers(old.replace(layers=tuple(layers), **capacities))
