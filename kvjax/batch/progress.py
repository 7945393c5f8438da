"""Progress of a job: a bar at a terminal, a line now and then elsewhere."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Sequence
from typing import Any

from kvjax.batch.rows import Record

_SECONDS = 10.0


class Progress:
    """Counts the answers of one process, and shows them on standard error when asked to."""

    def __init__(self, shown: bool):
        self.answered = self.failed = self.prompt_tokens = self.generated_tokens = 0
        self._shown, self._began = shown, time.perf_counter()
        self._total, self._done, self._said = 0, 0, self._began
        self._bar: Any = None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def start(self, total: int, label: str) -> None:
        """Rows this process is to answer."""
        self._began = self._said = time.perf_counter()
        self._total, self._label = total, label
        if self._shown and total and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            text = TextColumn("{task.description}"), TextColumn("{task.fields[at]}")
            self._bar = Bar(text[0], BarColumn(), MofNCompleteColumn(), text[1], console=Console(stderr=True))
            self._bar.add_task(label, total=total, at="")
            self._bar.start()

    def add(self, records: Sequence[Record]) -> None:
        """Records that are now durable."""
        self._done += len(records)
        self.failed += sum("error" in record for record in records)
        for record in records:
            if "error" not in record:
                self.answered += 1
                self.prompt_tokens += record["prompt_tokens"]
                self.generated_tokens += record["generated_tokens"]
        self._show()

    def skip(self, rows: int) -> None:
        """Rows that an earlier run had answered."""
        self._total -= rows

    def _show(self) -> None:
        rate = self.generated_tokens / max(self.seconds, 1e-9)
        left = datetime.timedelta(seconds=round((self._total - self._done) * self.seconds / max(self._done, 1)))
        at = f"{rate:,.0f} tokens/s, {left} left"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, total=self._total, at=at)
        elif self._shown and time.perf_counter() - self._said >= _SECONDS:
            self._said = time.perf_counter()
            print(f"{self._label}: {self._done:,} of {self._total:,} prompts, {at}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
