"""Caches, or conversations of rounds, as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from kvjax.cache import cache as cache_module
from kvjax.cache.cache import Cache, refuse_consumed
from kvjax.cache.host_memory import to_device
from kvjax.errors import UsageError
from kvjax.rounds.conversation import Conversation, join


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
    check_joinable("concatenate", given)
    return joined([to_device(item) if isinstance(item, Cache) else item.unparked() for item in given])


def check_joinable(asked: str, caches: Sequence[Any]) -> None:
    """UsageError where one is no cache, or was consumed, or where caches and conversations are mixed.

    Args:
      asked: what takes them, as the sentence names it.
    """
    for item in caches:
        if not isinstance(item, (Cache, Conversation)):
            raise UsageError(f"{asked} takes an output's cache or a list of them; a {type(item).__name__} was given.")
        refuse_consumed(item)
    if len({type(item) for item in caches}) > 1:
        raise UsageError("Caches and conversations of rounds cannot be one batch; continue these one by one instead.")


def joined(caches: Sequence[Any]) -> Any:
    """One batch of what was checked and is on the device."""
    return cache_module.concatenate(caches) if isinstance(caches[0], Cache) else join(caches)
