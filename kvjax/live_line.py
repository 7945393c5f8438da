"""One line that says what goes on: on a terminal, in a notebook, or now and then in a log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from kvjax.progress import Display, Event

#: Save the cursor and stay on this line; take both back; erase from the cursor on.
_BEGIN, _END, _ERASE = "\x1b7\x1b[?7l", "\x1b[?7h\x1b8", "\x1b[K"
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
#: Seconds between two lines of a log.
LOG_SECONDS = 10.0


def display(stream: TextIO, *, log: bool = False) -> Display | None:
    """The line that suits where this runs; None where nobody would see it, unless ``log``."""
    kernel = _kernel()
    if kernel is not None:
        return NotebookLine()
    if stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", ""):
        return TerminalLine(stream)
    return LogLine(stream) if log and stream is not None else None


def shown(events: Sequence[Event]) -> str:
    """The text of a line: the innermost stage, after the job that it is part of."""
    jobs = [event for event in events[:-1] if event.stage == "job"]
    return "; ".join(str(event) for event in [*jobs, *events[-1:]])


def _kernel() -> Any:
    """The notebook's kernel, if this runs in one."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython  # pyright: ignore[reportMissingImports]

    return getattr(get_ipython(), "kernel", None)


class TerminalLine:
    """A line after the cursor, which stays where it is: streamed text goes on there once the line is gone."""

    def __init__(self, stream: TextIO):
        from rich.console import Console

        self._stream, self._drawn, self._number = stream, False, 0
        self._console = Console(file=stream, highlight=False)

    def draw(self, events: Sequence[Event]) -> None:
        self._number += 1
        spinner = _SPINNER[self._number % len(_SPINNER)] if self._console.encoding.startswith("utf") else "."
        with self._console.capture() as capture:
            self._console.print(f" {spinner} {shown(events)}", style="dim", end="", no_wrap=True, overflow="ellipsis")
        self._write(f"{_BEGIN}{_ERASE}{capture.get()}{_END}")
        self._drawn = True

    def clear(self) -> None:
        if self._drawn:
            self._drawn = False
            self._write(_ERASE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class NotebookLine:
    """One output of a cell, updated in its place."""

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, events: Sequence[Event]) -> None:
        self._show(shown(events))

    def clear(self) -> None:
        if self._handle is not None:
            self._show("")

    def _show(self, text: str) -> None:
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        data = {"text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class LogLine:
    """A line now and then, for those who read a log of a job."""

    def __init__(self, stream: TextIO):
        self._stream, self._said = stream, time.perf_counter()

    def draw(self, events: Sequence[Event]) -> None:
        if time.perf_counter() - self._said >= LOG_SECONDS:
            self._said = time.perf_counter()
            print(shown(events), file=self._stream, flush=True)

    def clear(self) -> None:
        """Do nothing: the lines of a log stay."""
