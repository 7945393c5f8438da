"""The engine's loop: one iteration reads some of what waits and generates a chunk of tokens. No JAX.

What runs is given as a :class:`Worker`: the slots of a real batch, or a simulation with times of its own
(:mod:`kvjax.engine.simulate`). Both so follow the same schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Generic, Protocol

from kvjax.engine.schedule import Group, R, Scheduler, rows_to_wait_for

#: Tokens that a compiled call has room for.
MOST_STEPS = 64
#: Steps of the first call, which shows how long one takes.
_FIRST_STEPS = 4


class Worker(Protocol[R]):
    """Prefills prompts into slots and decodes them."""

    def read(self, group: Group[R]) -> Iterator[None]:
        """Read a group into its slots; other work may run wherever this stops."""
        ...

    def decode(self, steps: int, least_running: int) -> int:
        """Generate at most ``steps`` tokens for every slot that runs, while so many run; how many steps were taken."""
        ...

    def take_ended(self) -> list[int]:
        """The slots whose requests have ended since this was asked last."""
        ...


class Loop(Generic[R]):
    """Gives a worker its work, iteration by iteration.

    Attributes:
      scheduler: who waits, and which slots are free.
      max_pause: seconds that reading may keep running rows from their next token, unless one program takes longer.
      chunk_seconds: about the longest that a request waits for the end of a decode loop while slots are free.
      most_steps: tokens of a decode loop at most.
    """

    def __init__(
        self,
        scheduler: Scheduler[R],
        worker: Worker[R],
        clock: Callable[[], float],
        *,
        max_pause: float = 0.5,
        chunk_seconds: float = 0.5,
    ):
        self.scheduler, self._worker, self._clock = scheduler, worker, clock
        self.max_pause, self.chunk_seconds, self.most_steps = max_pause, chunk_seconds, MOST_STEPS
        self._reading: list[tuple[Group[R], Iterator[None]]] = []
        self._step_seconds = 0.0

    @property
    def running(self) -> int:
        """Slots whose prompts have been read."""
        held = sum(len(group.requests) for group, _ in self._reading)
        return self.scheduler.slots - self.scheduler.free - held

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._reading and not self.scheduler.waiting and not self.running

    def iterate(self) -> None:
        """Read some of what waits, then generate a chunk of tokens for what runs."""
        self._read()
        if self.running:
            self._decode()

    def _read(self) -> None:
        """Read groups while there are some, for ``max_pause`` seconds where rows are running meanwhile."""
        began, read = self._clock(), bool(self._reading)
        if read:
            self._read_on(0)  # what was begun first goes on in every iteration, whoever overtakes it
        while not (read and self.running and self._clock() - began >= self.max_pause) and self._begin():
            self._read_on(-1)
            read = True  # one an iteration, however short the pause may be

    def _read_on(self, place: int) -> None:
        """Read on until the reading stops next; it leaves the list when it is done."""
        try:
            next(self._reading[place][1])
        except StopIteration:
            self._reading.pop(place)
            self.release()

    def _begin(self) -> bool:
        """Begin with the next group where none is read, or a long one is and one that is quickly read waits."""
        if len(self._reading) < 2:
            quick = None if not self._reading else self._quicker_than(self._reading[0][0])
            group = self.scheduler.next_group() if quick is None else self.scheduler.next_group(quick)
            if group is not None:
                self._reading.append((group, self._worker.read(group)))
        return bool(self._reading)

    @staticmethod
    def _quicker_than(group: Group[R]) -> Callable[[R], bool]:
        most = min(request.together for request in group.requests)
        return lambda request: request.together > most

    def _decode(self) -> None:
        steps = min(self._steps(), self.most_steps)
        waiting = self.scheduler.waiting and not self.scheduler.free
        least = max(1, self.running - rows_to_wait_for(self.scheduler.slots) + 1) if waiting else 1
        began = self._clock()
        made = self._worker.decode(steps, least)
        if made:
            spent = (self._clock() - began) / made
            # The mean of the last few loops: steps become slower as caches fill.
            self._step_seconds = spent if not self._step_seconds else 0.7 * self._step_seconds + 0.3 * spent
        self.release()

    def _steps(self) -> int:
        if not self._step_seconds:
            return _FIRST_STEPS
        seconds = min(self.chunk_seconds, self.max_pause) if self._reading else self.chunk_seconds
        return max(1, min(MOST_STEPS, math.ceil(seconds / self._step_seconds)))

    def release(self) -> None:
        """Free the slots of requests that have ended."""
        for slot in self._worker.take_ended():
            self.scheduler.release(slot)
