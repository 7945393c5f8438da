"""Waiting that leaves the main thread awake: compilers and devices are waited for in threads of their own.

A thread that waits inside a compiler or a device answers no Ctrl-C, and draws nothing. So such waits go to a thread of
their own, about a tenth of a millisecond each. One that is broken off ends by itself; what it made is kept by JAX.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

from kvjax import progress
from kvjax.interrupt import breakably

T = TypeVar("T")
#: Seconds between two looks at what is going on; what ends wakes the thread that waits at once.
_TICK = 0.2


class _Job(Generic[T]):
    """A call on a thread of its own."""

    def __init__(self, function: Callable[[], T]):
        self._function, self.done = function, threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            self._error = error
        finally:
            del self._function
            _running.discard(self)
            self.done.set()

    def wait(self) -> T:
        while not self.done.wait(_TICK):
            progress.tick()
        if self._error is not None:
            raise self._error
        return self._result


_running: set[_Job[Any]] = set()
_AHEAD = "kvjax-ahead"
#: Those of them that were started for later, and that nobody has broken off.
_ahead: set[_Job[Any]] = set()


#: Threads that run models until they are told to end, and what tells them.
_lasting: dict[threading.Thread, Callable[[], None]] = {}


def end_at_exit(thread: threading.Thread, stop: Callable[[], None]) -> None:
    """Before the process ends have ``stop`` called, and wait for the thread, unless Ctrl-C ends the process."""
    _wait_at_exit()
    _lasting[thread] = stop


def forget(thread: threading.Thread) -> None:
    """Undo :func:`end_at_exit`, of a thread that ends, so that nothing of it is kept."""
    _lasting.pop(thread, None)


def is_ahead() -> bool:
    """Whether this is a thread of :func:`start`."""
    return threading.current_thread().name == _AHEAD


def start(function: Callable[[], T]) -> Callable[[], T]:
    """Call a function on a thread of its own; what is returned waits for its result, or raises its error."""
    _wait_at_exit()
    job = _Job(function)
    _running.add(job)
    _ahead.add(job)
    threading.Thread(target=job.run, daemon=True, name=_AHEAD).start()

    def wait() -> T:
        _ahead.discard(job)  # from here on it is waited for, or broken off
        return job.wait()

    return wait


def in_thread(function: Callable[[], T]) -> T:
    """Call a function on a thread of its own while this one can be woken by Ctrl-C; its result or error is the call's.

    An exception in this thread, such as KeyboardInterrupt, leaves it to itself.
    """
    if threading.current_thread() is not threading.main_thread() and not progress.current().visible:
        return function()  # nobody looks, and Ctrl-C does not come here
    _wait_at_exit()
    job = _Job(function)
    _running.add(job)
    threading.Thread(target=job.run, daemon=True, name="kvjax-waiting").start()
    return job.wait()


def ready(arrays: T, *, breakable: bool = True) -> T:
    """Wait until arrays are computed; where ``breakable``, Ctrl-C ends the wait, and the device goes on by itself."""
    import jax

    leaves = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array) and not leaf.is_deleted()]
    if all(leaf.is_ready() for leaf in leaves):  # pyright: ignore[reportAttributeAccessIssue]
        return arrays
    wait = functools.partial(in_thread, lambda: jax.block_until_ready(leaves))
    breakably(wait) if breakable else wait()
    return arrays


def wait_for_abandoned() -> None:
    """Wait for the work that Ctrl-C broke off, which goes on by itself."""
    for job in _running - _ahead:
        while not job.done.wait(_TICK):
            progress.tick()


@functools.cache
def _wait_at_exit() -> None:
    # Python ends threads where they stand, and a compiler that is ended so takes the process down with an error of
    # its own. Registered after JAX was imported, this comes before JAX takes its devices down.
    atexit.register(_last_wait)


def _last_wait() -> None:
    _ahead.clear()
    if _interrupted():
        return
    try:
        wait_for_abandoned()
        lasting = list(_lasting.items())
        for _, stop in lasting:
            stop()
        for thread, _ in lasting:
            thread.join()
    except KeyboardInterrupt:
        _end(130)


def _at_work() -> bool:
    """Whether threads are where Python must not end them."""
    return bool(_running) or any(thread.is_alive() for thread in list(_lasting))


def _interrupted() -> bool:
    """Whether Ctrl-C is what ends the process."""
    return issubclass(getattr(sys, "last_type", None) or object, KeyboardInterrupt) and not hasattr(sys, "ps1")


@atexit.register  # early, so that it comes after what scripts registered later
def _end_broken_off() -> None:
    """End where Python would end threads, with the exit code that it has for Ctrl-C."""
    if _at_work() and _interrupted():
        _flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        _end(130)  # where that ends nothing


def leave(code: int, *, at_once: bool) -> int:
    """The exit code; where something still runs, or ``at_once``, the process ends here."""
    return _end(code) if at_once or _at_work() else code


def _end(code: int) -> NoReturn:
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
