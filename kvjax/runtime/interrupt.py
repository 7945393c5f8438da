"""Ctrl-C while generating asks the loop to end after the running chunk, so that nothing generated is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether Ctrl-C was pressed."""

    requested = False


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C of this block into ``requested``; a second one raises KeyboardInterrupt as usual.

    Outside the main thread, where signals cannot be handled, Ctrl-C keeps its usual meaning.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:  # someone else handles it: leave it to them
        yield interrupt
        return

    def handle(number: int, frame: FrameType | None) -> None:
        interrupt.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        # A handler that someone installed meanwhile (a stream may be held for long) is theirs.
        if signal.getsignal(signal.SIGINT) in (handle, signal.default_int_handler):
            signal.signal(signal.SIGINT, previous)
