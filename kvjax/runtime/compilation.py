"""Time spent tracing and compiling, told apart from running; and how many programs were compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import jax.monitoring

_PREFIX = "/jax/core/compile/"
_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class CompileClock:
    """Seconds and programs compiled while a :func:`compile_clock` was open."""

    seconds: float = 0.0
    programs: int = 0


_open: list[CompileClock] = []


def _listen(event: str, duration: float, **_: object) -> None:
    if event.startswith(_PREFIX):
        for clock in _open:
            clock.seconds += duration
            clock.programs += event == _COMPILED


@functools.cache
def _register() -> None:
    # JAX offers no way to take a listener back, so there is one for the process, and it only adds numbers.
    jax.monitoring.register_event_duration_secs_listener(_listen)


@contextmanager
def compile_clock() -> Iterator[CompileClock]:
    """Count what JAX traces, lowers and compiles in this block, in any thread."""
    _register()
    clock = CompileClock()
    _open.append(clock)
    try:
        yield clock
    finally:
        _open.remove(clock)
