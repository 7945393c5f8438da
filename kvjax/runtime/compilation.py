"""Time spent tracing and compiling, told apart from running; and how many programs were compiled."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax.monitoring

from kvjax.waiting import is_ahead

_PREFIX = "/jax/core/compile/"
_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(eq=False)  # clocks are told apart by identity: two that counted the same are two
class CompileClock:
    """Seconds and programs compiled while a :func:`compile_clock` was open."""

    programs: int = 0
    _opened: float = dataclasses.field(default_factory=time.perf_counter)
    _spans: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self._spans)

    def _add(self, start: float, end: float) -> None:
        start = max(start, self._opened)  # what an earlier call broke off may end in this one
        # Tracing one program traces others inside it: a span that encloses earlier ones replaces them.
        while self._spans and self._spans[-1][0] >= start:
            self._spans.pop()
        self._spans.append((start, end))


_open: list[CompileClock] = []


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event.startswith(_PREFIX):
        now = time.perf_counter()
        for clock in _open:
            if not is_ahead():  # of what is compiled for later, what is waited for counts
                clock._add(now - duration_secs, now)
            clock.programs += event == _COMPILED


@functools.cache
def _register() -> None:
    # JAX offers no way to take a listener back, so there is one for the process, and it only adds numbers.
    jax.monitoring.register_event_duration_secs_listener(_listen)


@contextmanager
def compile_clock() -> Iterator[CompileClock]:
    """Count what JAX traces, lowers and compiles in this block, in any thread."""
    clock = open_clock()
    try:
        yield clock
    finally:
        close_clock(clock)


def open_clock() -> CompileClock:
    """A clock that counts from now on, until :func:`close_clock`."""
    _register()
    clock = CompileClock()
    _open.append(clock)
    return clock


def close_clock(clock: CompileClock) -> None:
    """Count no more."""
    if clock in _open:
        _open.remove(clock)
