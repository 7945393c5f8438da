"""The handle that ``Engine.submit`` returns: wait for the result, stream its text, or cancel."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

from kvjax.checks import number
from kvjax.engine.row import Row, Timestamps
from kvjax.output import Output, Piece
from kvjax.text.detokenizer import TextStream


class Handle:
    """A request that an engine answers; any thread, and any event loop, may wait for it.

    Iterating gives :class:`kvjax.Piece` as tokens come, the last one with the output; so does ``async for``. It may be
    done several times, and begins at the first token each time. ``await handle`` is :meth:`result`.

    Attributes:
      row: the request as the engine has it. streaming: whether somebody iterates, or has.
    """

    def __init__(self, row: Row, cancel: Callable[[Row], None]):
        self.row, self._cancel = row, cancel
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._count, self._over = 0, False
        self.streaming = False
        row.on_change = self._told

    def _told(self, row: Row) -> None:
        """Called by the engine's thread."""
        with self._changed:
            self._count, self._over = len(row.tokens), row.ended
            self._changed.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._over

    @property
    def times(self) -> Timestamps:
        """Times of arrival, start of prefill, first token and end, in seconds of ``time.perf_counter``."""
        return self.row.times

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the output.

        Raises:
          TimeoutError: after ``timeout`` seconds; the request goes on.
          KvjaxError: what went wrong with it.
        """
        check_timeout(timeout)
        with self._changed:
            if not self._changed.wait_for(lambda: self._over, timeout):
                raise TimeoutError(f"The request has not ended after {timeout} seconds; it goes on.")
        return self._outcome()

    def _outcome(self) -> Output:
        if self.row.error is not None:
            raise self.row.error
        assert self.row.output is not None
        return self.row.output

    def cancel(self) -> None:
        """Call it off; what there is becomes its output, with finish_reason "cancelled". One that has ended stays."""
        self._cancel(self.row)

    def stream(self) -> Iterator[Piece]:
        """Text as it comes, in pieces of a few tokens; the last one holds the whole ``output``."""
        self.streaming = True
        text, done = TextStream(self.row.request.lm.tokenizer, self.row.request.options.stop_strings), 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._count > done)  # noqa: B023  waited for here
            piece, done = self._piece(text, done)
            if piece is not None:
                yield piece
            if piece is not None and piece.output is not None:
                return

    __iter__ = stream

    def _piece(self, text: TextStream, done: int) -> tuple[Piece | None, int]:
        """The text after ``done`` tokens, and the new number of tokens."""
        over, count = self._over, self._count
        if done < count:
            new = tuple(self.row.tokens[done:count])
            return Piece(text.add(new), new), count
        return (Piece(text.rest(), (), self._outcome()) if over else None), count

    async def __aiter__(self) -> AsyncIterator[Piece]:
        self.streaming = True
        text, done = TextStream(self.row.request.lm.tokenizer, self.row.request.options.stop_strings), 0
        with _Listening(self) as listening:
            while True:
                piece, done = self._piece(text, done)
                if piece is None:
                    await listening.change()
                    continue
                yield piece
                if piece.output is not None:
                    return

    def __await__(self) -> Generator[Any, None, Output]:
        return self._awaited().__await__()

    async def _awaited(self) -> Output:
        with _Listening(self) as listening:
            while not self._over:
                await listening.change()
        return self._outcome()


def check_timeout(timeout: float | None) -> None:
    """Refuse what is no number of seconds."""
    if timeout is not None:
        number("timeout", timeout, 0.0)


class _Listening:
    """Changes of a request, told to the event loop that waits for them."""

    def __init__(self, handle: Handle):
        self._handle, self._loop, self._event = handle, asyncio.get_running_loop(), asyncio.Event()

    def __enter__(self) -> _Listening:
        with self._handle._changed:
            self._handle._listeners.append(self._tell)
        self._event.set()  # what came before is looked at first
        return self

    def __exit__(self, *error: object) -> None:
        with self._handle._changed:
            self._handle._listeners.remove(self._tell)

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits there any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def change(self) -> None:
        """Wait until something has changed since the last time."""
        await self._event.wait()
        self._event.clear()
