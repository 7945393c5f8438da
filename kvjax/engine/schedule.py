"""The engine's queue and its slots: who is read next, together with whom, and into which slot. No JAX.

First come, first served: the request that has waited longest is in the next group that is read, and those behind it
join it only where they are read by the same program. On a mesh slots belong to the devices of the data axis, and a
group has equally many places on each.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar


class Schedulable(Protocol):
    """A request as the scheduler sees it.

    Attributes:
      kind: requests of one kind are read by one program. together: the most of its kind that are read at once, on each
        device of the data axis.
    """

    @property
    def kind(self) -> Hashable: ...
    @property
    def together(self) -> int: ...


R = TypeVar("R", bound=Schedulable)


@dataclasses.dataclass(frozen=True)
class Group(Generic[R]):
    """Requests that are read together.

    Attributes:
      places: of the batch they are read as, the request of each row and its slot, or None of a row of padding; on a
        mesh the rows of the first device of the data axis come first.
    """

    places: tuple[tuple[R, int] | None, ...]

    @property
    def requests(self) -> list[R]:
        return [place[0] for place in self.places if place is not None]


class Scheduler(Generic[R]):
    """Requests that wait, and slots that are free.

    Attributes:
      slots: of the batch. shards: devices of the data axis, which have equally many of them.
    """

    def __init__(self, slots: int, shards: int = 1):
        if slots % shards:
            raise ValueError(f"{slots} slots cannot be divided among {shards} devices")
        self.slots, self.shards = slots, shards
        each = slots // shards
        self._free = [list(range(shard * each, (shard + 1) * each))[::-1] for shard in range(shards)]
        self._waiting: deque[R] = deque()

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return sum(map(len, self._free))

    def add(self, request: R) -> None:
        """Put a request at the end of the queue."""
        self._waiting.append(request)

    def drop(self, request: R) -> bool:
        """Take a request out of the queue; False where it no longer waits."""
        if request not in self._waiting:
            return False
        self._waiting.remove(request)
        return True

    def release(self, slot: int) -> None:
        """A request has left its slot."""
        self._free[slot * self.shards // self.slots].append(slot)

    def next_group(self, accept: Callable[[R], bool] = lambda request: True) -> Group[R] | None:
        """The request that has waited longest, of those to ``accept``, with others of its kind, given slots; or None
        where nobody waits or no slot is free.
        """
        first = next((request for request in self._waiting if accept(request)), None)
        if first is None or not self.free:
            return None
        room = [min(first.together, len(free)) for free in self._free]
        chosen = [request for request in self._waiting if request.kind == first.kind and accept(request)][: sum(room)]
        found: list[list[Any]] = [[] for _ in self._free]
        for request in chosen:
            # To the device with most free slots, so that devices stay equally full.
            shard = max(range(self.shards), key=lambda i: (len(found[i]) < room[i], len(self._free[i])))
            found[shard].append((request, self._free[shard].pop()))
            self._waiting.remove(request)
        # One row each, or as many as the program takes: two sizes are compiled, and no more.
        rows = 1 if max(map(len, found)) == 1 else first.together
        return Group(tuple(place for own in found for place in [*own, *[None] * (rows - len(own))]))


def rows_to_wait_for(slots: int) -> int:
    """The number of slots that must have come free before a decode loop stops for those who wait.

    A stop costs the host's work between two programs and a prefill of few rows; a slot that waits costs its part of
    every step.
    """
    return max(1, slots // 16)
