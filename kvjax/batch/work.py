"""Answers the rows of a job through the slots of an engine; conversations of rounds in batches of ``generate``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from kvjax.batch.job import Job
from kvjax.batch.rows import PADDING_ROW, Record, Row, answered, failed
from kvjax.cache.buckets import prompt_bucket
from kvjax.engine.core import EngineCore
from kvjax.engine.row import Row as EngineRow
from kvjax.errors import DoesNotFit, KvjaxError, UsageError
from kvjax.generation import answer
from kvjax.policies import parse
from kvjax.request import Request

#: The reason of an answer that outgrew its slot.
_SLOT_FULL = "memory"


def batches(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Rows in batches of ``size``, the longest first; only the last batch may have fewer.

    A batch compiles for the bucket of its longest row, so a job compiles a program a bucket; sorted rows waste no more
    than a batch at each border of two buckets.
    """
    ordered = sorted(rows, key=lambda row: (-prompt_bucket(len(row.tokens)), -row.limit, -len(row.tokens), row.number))
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows as an engine is given them: the longest first, so that none is left when all others have ended."""
    return sorted(rows, key=lambda row: (-row.limit, -len(row.tokens), row.number))


class Worker:
    """Answers rows of one job, ``size`` at a time."""

    def __init__(self, job: Job, size: int, between: Callable[[], None]):
        self._job, self._size, self._between = job, size, between
        # The rows went through the chat template when they were read; what goes on is told as the job tells it.
        self._options = dataclasses.replace(job.options, chat=False, progress=None)
        self._core: EngineCore | None = None

    def close(self) -> None:
        """Free the slots."""
        if self._core is not None:
            self._core.close()
            self._core = None

    def answer(self, take: Callable[[], Sequence[Row] | None]) -> Iterator[list[Record]]:
        """Records of rows, in the order in which they are answered.

        What cannot be answered alone is the row's own error. ``between`` is called before anything runs and after every
        chunk of tokens; an exception it raises ends the job, and nothing is kept of the rows that were under way.

        Args:
          take: gives the next rows, None at the end; asked when those before have left the queue, so that slots stay
            busy from one shard to the next.
        """
        rounds = parse(self._options.policy or "full").offloads_rounds
        rows = take()
        while rows is not None:
            if rounds:
                for batch in batches(rows, self._size):
                    self._between()
                    yield self._batch(batch, self._size)
                rows = take()
            else:
                rows = yield from self._served(rows, take)

    # --- through an engine ---------------------------------------------------------------------------------------

    def _served(
        self, rows: Sequence[Row], take: Callable[[], Sequence[Row] | None]
    ) -> Generator[list[Record], None, Sequence[Row] | None]:
        """Rows and those taken after them through the slots of one engine; returns the first that it does not hold."""
        self._between()
        if not rows:
            return take()
        core = self._engine(*self._largest(rows))
        if core is None:  # the longest ones have no room: those, and then the others
            longest = prompt_bucket(max(len(row.tokens) for row in rows))
            for row in rows:
                if prompt_bucket(len(row.tokens)) == longest:
                    self._between()
                    yield self._batch([row], 1)
            return [row for row in rows if prompt_bucket(len(row.tokens)) < longest]
        ended: list[tuple[Row, EngineRow]] = []
        yield from self._add(core, in_order(rows), ended)
        coming: Sequence[Row] | None = None
        more = True
        while True:
            while more and not core.waiting:
                if coming is None:
                    coming = take()
                    more = coming is not None
                if not coming:
                    coming = None
                elif core.holds(*self._largest(coming)):
                    yield from self._add(core, in_order(coming), ended)
                    coming = None
                else:
                    break  # another engine's, when this one is idle
            if core.loop.idle:
                return coming
            core.loop.iterate()
            self._between()
            found, ended[:] = list(ended), []
            if made := [record for row, slot in found for record in self._record(row, slot)]:
                yield made

    def _add(self, core: EngineCore, rows: Sequence[Row], ended: list[tuple[Row, EngineRow]]) -> Iterator[list[Record]]:
        """Queue rows, which come to ``ended`` when they have; those that cannot be have their errors here."""
        for row in rows:
            try:
                request = Request(self._job.lm, list(row.tokens), self._options, exact=True)
                slot = core.slots.row_of(request, number=row.number % 2**31, limit=min(row.limit, 2**31 - 1))
            except (UsageError, DoesNotFit) as error:
                yield [failed(row.number, row.id, error)]
                continue

            def changed(slot: EngineRow, row: Row = row) -> None:
                if slot.ended:
                    ended.append((row, slot))

            slot.on_change = changed
            core.add(slot)

    def _record(self, row: Row, slot: EngineRow) -> list[Record]:
        """The record of a row that has left its slot; one that outgrew it is answered where caches may grow."""
        if slot.error is not None:
            if not isinstance(slot.error, KvjaxError):
                raise slot.error
            return [failed(row.number, row.id, slot.error)]
        assert slot.output is not None, "it has ended"
        if slot.output.finish_reason == _SLOT_FULL:
            return self._batch([row], 1)
        return [answered(row, slot.output)]

    def _largest(self, rows: Sequence[Row]) -> tuple[int, int]:
        """Tokens that a slot needs for the longest prompt of rows, and for their longest answer."""
        prompt = prompt_bucket(max(len(row.tokens) for row in rows))
        return min(prompt, self._job.lm.config.max_position), max(row.limit for row in rows)

    def _engine(self, prompt: int, new: int) -> EngineCore | None:
        """An engine for such rows: the one there is, or one of as many slots as fit; None where not even one does."""
        if self._core is not None and self._core.holds(prompt, new):
            return self._core
        self.close()
        size = self._size
        while self._core is None and size >= 1:
            sizes: dict[str, Any] = {"slots": size, "prompt_tokens": prompt, "new_tokens": new}
            limit = self._options.memory_limit
            try:
                self._core = EngineCore(
                    self._job.lm, self._options.policy, self._options.storage, **sizes, memory_limit=limit
                )
            except DoesNotFit:
                size //= 2
        return self._core

    # --- as calls of generate --------------------------------------------------------------------------------------

    def _batch(self, rows: Sequence[Row], size: int) -> list[Record]:
        """Records of rows that are answered as one batch, filled up to ``size``; in halves where that does not fit."""
        filled = [*rows, *[PADDING_ROW] * (size - len(rows))]
        try:
            request = Request(
                self._job.lm,
                [list(row.tokens) for row in filled],
                self._options,
                limits=[row.limit for row in filled],
                numbers=[row.number for row in filled],
                exact=True,
            )
            outputs = answer(request, between=self._between)
        except (UsageError, DoesNotFit) as error:
            if len(rows) == 1:
                return [failed(rows[0].number, rows[0].id, error)]
            half = len(rows) // 2
            return self._batch(rows[:half], half) + self._batch(rows[half:], len(rows) - half)
        return [answered(row, output) for row, output in zip(rows, outputs, strict=False)]
