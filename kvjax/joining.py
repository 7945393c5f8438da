"""Caches, or conversations of rounds, as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from kvjax.cache import value
from kvjax.cache.value import Cache, refuse_consumed
from kvjax.errors import UsageError
from kvjax.rounds.memory import to_device
from kvjax.rounds.value import Conversation, join


@overload
def concatenate(caches: Sequence[Cache]) -> Cache: ...
@overload
def concatenate(caches: Sequence[Conversation]) -> Conversation: ...


def concatenate(caches: Sequence[Cache] | Sequence[Conversation]) -> Cache | Conversation:
    """One batch out of several caches, or out of several conversations of rounds, in order.

    They share model, policy and storage. Each head gets the largest of its allocations; rounds are shared with the
    conversations they come from, not copied. What is parked comes to the device.

    Raises:
      UsageError: there is none, caches and conversations are mixed, models, policies or storages differ, or a policy's
        own state depends on the allocation and the allocations differ.
    """
    given = list(caches)
    if not given:
        raise UsageError("No cache was given to concatenate; give at least one.")
    for item in given:
        if not isinstance(item, (Cache, Conversation)):
            raise UsageError(f"concatenate takes outputs' caches; a {type(item).__name__} was given.")
        refuse_consumed(item)
    plain = [to_device(item) for item in given if isinstance(item, Cache)]
    if len(plain) == len(given):
        return value.concatenate(plain)
    if plain:
        raise UsageError("Caches and conversations of rounds cannot be one batch; continue these one by one instead.")
    return join([item.unparked() for item in given if isinstance(item, Conversation)])
