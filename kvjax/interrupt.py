"""Ctrl-C while a model runs: what can be broken off is, and what has begun to change a cache ends first."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class Interrupt:
    """Ctrl-C in a block of :func:`interruptible`.

    Attributes:
      requested: whether it was pressed.
      finishing: whether what remains is to be done all the same, because it gives what there is.
      answered: whether it ended something: by an error, or by what the block gives. Otherwise it came when all was
        done, and is told once more after the block, to whatever comes next.
    """

    requested = False
    finishing = False
    answered = False
    at = 0.0  # when it was pressed, by the monotonic clock


class BrokenOff(KeyboardInterrupt):
    """Ctrl-C ended work that had changed nothing yet."""


class _Main:
    """The main thread's state, which the handler reads: signals arrive in the main thread alone."""

    active: Interrupt | None = None
    breakable = 0
    again: threading.Timer | None = None


#: Seconds after which Ctrl-C is told once more, where it came while Python cleaned up.
_AGAIN = 0.02


#: Seconds after which a generator that is dropped tells nobody of a Ctrl-C: Python may drop it at any later time.
_STALE = 10.0


#: Python's own modules whose functions run when an object has gone.
_WEAK = ("/weakref.py", "/_weakrefset.py")


def _in_cleanup(frame: FrameType | None) -> bool:
    """Whether Python drops what is raised here: in finalizers, weak references that end, callbacks of its collector."""
    collecting = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code in collecting or code.co_filename.endswith(_WEAK):
            return True
        frame = frame.f_back
    return False


def _tell_again() -> None:
    """Send Ctrl-C once more, a moment later."""
    _Main.again = threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGINT))
    _Main.again.daemon = True  # a process that has ended by then is not told
    _Main.again.start()


def _raise_or_tell_again(number: int, frame: FrameType | None) -> None:
    """Python's own handler, but where Python drops what it raises."""
    if _in_cleanup(frame):
        _tell_again()
        return
    if _Main.active is not None:
        _Main.active.answered = True  # by this one
    raise KeyboardInterrupt


#: Handlers in whose place :func:`interruptible` puts its own.
_RAISING = (signal.default_int_handler, _raise_or_tell_again)


@contextmanager
def never_lost() -> Iterator[None]:
    """Have every Ctrl-C of this block raise, also one that comes while Python cleans up and drops what is raised."""
    handled = _in_main() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handled:
        signal.signal(signal.SIGINT, _raise_or_tell_again)
    try:
        yield
    finally:
        if handled:
            disregard()  # all is done
            if signal.getsignal(signal.SIGINT) is _raise_or_tell_again:
                signal.signal(signal.SIGINT, signal.default_int_handler)


def disregard() -> None:
    """Tell nobody of a Ctrl-C that came when all was done: whoever waits for the call takes it for answered."""
    if _Main.again is not None:
        _Main.again.cancel()


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C of this block into ``requested``; a second one raises KeyboardInterrupt as usual.

    Within :func:`breakably` the first one raises at once. Outside the main thread, where signals cannot be handled,
    and where somebody else handles them, Ctrl-C keeps its meaning.
    """
    interrupt = Interrupt()
    if not _in_main():
        yield interrupt
        return
    previous = signal.getsignal(signal.SIGINT)
    if previous not in _RAISING:  # someone else handles it: leave it to them
        yield interrupt
        return

    def again() -> None:
        if _Main.active is interrupt and _Main.breakable:
            os.kill(os.getpid(), signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        interrupt.requested, interrupt.at = True, time.monotonic()
        if _Main.breakable and not interrupt.finishing and _in_cleanup(frame):
            threading.Timer(_AGAIN, again).start()
            return
        signal.signal(signal.SIGINT, _raise_or_tell_again)
        if _Main.breakable and not interrupt.finishing:
            interrupt.answered = True
            raise BrokenOff

    outer, _Main.active, _Main.breakable = _Main.active, interrupt, 0
    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    except KeyboardInterrupt:
        interrupt.answered = True
        raise
    except GeneratorExit:
        interrupt.answered |= time.monotonic() - interrupt.at > _STALE
        raise
    finally:
        _Main.active, _Main.breakable = outer, 0
        # A handler that someone installed meanwhile (a stream may be held for long) is theirs.
        if signal.getsignal(signal.SIGINT) in (handle, *_RAISING):
            signal.signal(signal.SIGINT, previous)
        if interrupt.requested and not interrupt.answered:
            _tell_again()


def breakably(function: Callable[[], T]) -> T:
    """Call a function that Ctrl-C may end at any place, because nothing depends on how far it came.

    Raises:
      BrokenOff: Ctrl-C was pressed, now or earlier in the block of :func:`interruptible`.
    """
    if not _in_main():
        return function()
    try:
        _Main.breakable += 1
        active = _Main.active
        if active is not None and active.requested and not active.finishing:
            active.answered = True
            raise BrokenOff
        return function()
    finally:
        _Main.breakable -= 1
