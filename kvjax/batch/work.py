"""Answers the rows of a job: batches of similar length, each of which runs as one call of ``generate``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kvjax.batch.job import Job
from kvjax.batch.rows import PADDING_ROW, Record, Row, answered, failed
from kvjax.cache.buckets import prompt_bucket
from kvjax.errors import DoesNotFit, UsageError
from kvjax.generation import answer
from kvjax.request import Request


def batches(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Rows in batches of ``size``, the longest first; only the last batch may have fewer.

    A batch compiles for the bucket of its longest row, so a job compiles a program a bucket; sorted rows waste no more
    than a batch at each border of two buckets.
    """
    ordered = sorted(rows, key=lambda row: (-prompt_bucket(len(row.tokens)), -row.limit, -len(row.tokens), row.number))
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


class Worker:
    """Answers batches of one job, always ``size`` rows together: padding rows stand where there are fewer."""

    def __init__(self, job: Job, size: int, between: Callable[[], None]):
        self._job, self._size, self._between = job, size, between
        # The rows went through the chat template when they were read; what goes on is told as the job tells it.
        self._options = dataclasses.replace(job.options, chat=False, progress=None)

    def answer(self, rows: Sequence[Row]) -> list[Record]:
        """A record of each row.

        Rows that do not fit the memory together are answered in halves; what cannot be answered alone is the row's
        own error.

        ``between`` is called before the batch and after every chunk of its tokens; an exception it raises ends the
        batch, and nothing of it is kept.
        """
        self._between()
        return self._answer(rows, self._size)

    def _answer(self, rows: Sequence[Row], size: int) -> list[Record]:
        job = self._job
        filled = [*rows, *[PADDING_ROW] * (size - len(rows))]
        try:
            request = Request(
                job.lm,
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
            return self._answer(rows[:half], half) + self._answer(rows[half:], len(rows) - half)
        return [answered(row, output) for row, output in zip(rows, outputs, strict=False)]
