"""Measures what studies of papers need: every ground's questions, once, of every cache that any study compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.eval.entries import Entry
from kvjax.eval.papers.paper import Ground, Paper
from kvjax.eval.papers.registry import grounds
from kvjax.eval.suites import estimate
from kvjax.eval.suites.data import DataFolder
from kvjax.eval.suites.folder import JOURNAL
from kvjax.eval.suites.hosts import agree
from kvjax.eval.suites.item import Asked, Item
from kvjax.eval.suites.journal import Journal, RunSettings
from kvjax.eval.suites.registry import asked_of, find_suite
from kvjax.eval.suites.runner import Runner
from kvjax.runtime.distributed import group


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run of the suite; ``length`` and ``limit`` replace those of every ground.

    Attributes:
      model, dtype, weights: as typed. quick: few questions and caches. seed: of samples and bootstrap.
      storage, batch_size: as of other suites.
    """

    model: str
    dtype: str | None
    weights: str | None
    quick: bool
    length: int | None
    limit: int | None
    seed: int
    storage: str
    batch_size: int


class Measured:
    """One ground's questions with the answers so far; ``absent`` says why there are none.

    Args:
      folder: where the ground's answers are kept.
    """

    def __init__(self, ground: Ground, folder: Path, options: Options, data: DataFolder, papers: Sequence[Paper]):
        self.ground, self.items, self.absent = ground, list[Item](), ""
        studies = [study for paper in papers for study in paper.studies if study.ground == ground]
        caches = [cache for study in studies for cache in study.chosen(options.quick).values()]
        self.caches: list[Entry] = list(dict.fromkeys(caches))
        self.refused: dict[tuple[str, float | None], str] = {}
        self.journal: Journal | None = None
        self._asked: Asked | None = None
        self._runner: Runner | None = None
        self._everyone = group()
        if not self.caches:
            return
        tasks = ground.quick_tasks if options.quick else ground.tasks
        length = options.length or (ground.quick_length if options.quick else ground.length)
        limit = options.limit or (ground.quick_limit if options.quick else ground.limit)
        try:
            self._asked = asked_of(
                find_suite(ground.suite), data, tasks=tasks, length=length, limit=limit, seed=options.seed,
                quick=options.quick,
            )  # fmt: skip
        except UsageError as error:
            self.absent = str(error)
            return
        settings = RunSettings(
            options.model, options.dtype, options.weights, ground.suite, self._asked.tasks, self._asked.length,
            self._asked.limit, options.quick, options.seed, ground.mode, options.storage, options.batch_size,
        )  # fmt: skip
        self.journal = Journal(folder / ground.name / JOURNAL, settings, self._everyone.process)

    def prepare(self, lm: LanguageModel, data: DataFolder, say: Callable[[str], None]) -> None:
        """Make the questions; a ground whose questions do not fit the model is absent."""
        if self.journal is None or self._asked is None:
            return
        try:
            self.items = find_suite(self.ground.suite).items(lm, data, self._asked)
            if not self.items:
                raise UsageError(f"There are no questions of {', '.join(self._asked.tasks)}.")
            self._runner = Runner(lm, self.items, self.journal, say, self._everyone)
        except UsageError as error:
            self.absent, self.journal = str(error), None
        agree(self._everyone, "absent", {f"the questions of {self.ground.name} refused": self.absent})
        if self._runner is None:
            return
        self.refused = self._runner.refused
        self._runner.begin(self.caches)

    @property
    def missing(self) -> int:
        """Answers that are still to be given."""
        return 0 if self._runner is None else self._runner.missing(self.caches)

    @property
    def answered(self) -> int:
        """Answers that this process has given."""
        return 0 if self._runner is None else self._runner.answered

    def seconds(self, lm: LanguageModel) -> float:
        """An estimate of what they take."""
        if self._runner is None or not self.missing:
            return 0.0
        whole = len(self.items) * len(self.caches)
        policies = [cache.policy() for cache in self.caches]
        return estimate.seconds(lm, self._runner.batches, policies) * self.missing / whole

    def run(self) -> None:
        """Ask what is missing."""
        if self._runner is not None:
            self._runner.run(self.caches)

    def close(self) -> None:
        """Close the journal, with what other processes have answered so far."""
        if self.journal is not None:
            self.journal.close()
            if self._everyone.processes > 1 and self._everyone.process == 0:
                self.journal.read_again()


def measured(papers: Sequence[Paper], folder: Path, options: Options, data: DataFolder) -> list[Measured]:
    """Every ground of these papers, with the answers of an earlier run; UsageError where that had other settings."""
    return [Measured(ground, folder, options, data, papers) for ground in grounds(list(papers))]
