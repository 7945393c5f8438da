"""The numbers of what a process has answered, and what they and the others' say of a job's progress."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvjax.batch.rows import Record
from kvjax.progress import Stage


class Counts:
    """Counts the answers of one process."""

    def __init__(self) -> None:
        self.answered = self.failed = self.prompt_tokens = self.generated_tokens = 0
        self._total, self._done, self._began = 0, 0, time.perf_counter()
        self._others_done = self._others_tokens = 0
        self._stage: Stage | None = None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def numbers(self) -> list[int]:
        """Rows answered and failed, prompt tokens and generated tokens."""
        return [self.answered, self.failed, self.prompt_tokens, self.generated_tokens]

    def others(self, numbers: Sequence[Sequence[int]]) -> None:
        """The :attr:`numbers` of all other processes so far."""
        self._others_done = sum(answered + failed for answered, failed, _, _ in numbers)
        self._others_tokens = sum(generated for _, _, _, generated in numbers)

    def start(self, total: int, stage: Stage) -> None:
        """Rows that all processes are to answer, and where this one says how many are.

        Begun again, with what is left, when a process was lost: time and rows are of the whole run.
        """
        if self._stage is None:
            self._began, self._total = time.perf_counter(), total
        self._stage = stage

    def add(self, records: Sequence[Record]) -> None:
        """Records that are now durable."""
        self._done += len(records)
        self.failed += sum("error" in record for record in records)
        for record in records:
            if "error" not in record:
                self.answered += 1
                self.prompt_tokens += record["prompt_tokens"]
                self.generated_tokens += record["generated_tokens"]
        if self._stage is not None:
            rate = (self.generated_tokens + self._others_tokens) / max(self.seconds, 1e-9)
            done = min(self._done + self._others_done, self._total)
            self._stage.update(done, self._total, note=f"{rate:,.0f} tokens/s")

    def skip(self, rows: int) -> None:
        """Rows that an earlier run had answered."""
        self._total -= rows
