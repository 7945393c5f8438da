"""A paper: its reported results, and what is measured here in their place."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath

from kvjax.eval.entries import REFERENCE, Entry
from kvjax.eval.suites.runner import AFTER, IN_VIEW


@dataclasses.dataclass(frozen=True)
class Published:
    """A table of numbers as a paper prints it.

    Attributes:
      source: where they stand, such as "Table 4".
      title: of what they are.
      columns: their headings.
      rows: (model, label, numbers), each number as printed; "-" where the paper has none.
    """

    source: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, str, tuple[str, ...]], ...]

    def value(self, model: str, label: str, column: str) -> str | None:
        """The paper's number of this model, or None where it did not measure it."""
        place = self.columns.index(column)
        return next((values[place] for name, row, values in self.rows if row == label and same(model, name)), None)


def published(source: str, title: str, columns: str, text: str) -> Published:
    """A table out of lines ``model | label | numbers``; an empty model is the one above, and commas part columns."""
    rows: list[tuple[str, str, tuple[str, ...]]] = []
    for line in text.strip().splitlines():
        model, label, numbers = (part.strip() for part in line.split("|"))
        rows.append((model or rows[-1][0], label, tuple(numbers.split())))
    names = tuple(name.strip() for name in columns.split(","))
    assert all(len(values) == len(names) for *_, values in rows), source
    return Published(source, title, names, tuple(rows))


def same(model: str, name: str) -> bool:
    """Whether a model by its name, path or hub id is the one that a paper names."""
    plain = (PurePath(text).name.lower().replace("-", "").replace("_", "") for text in (model, name))
    mine, theirs = (
        text.removesuffix(".gguf").replace("instruct", "inst").replace("metallama", "llama") for text in plain
    )
    return mine == theirs


@dataclasses.dataclass(frozen=True)
class Ground:
    """Questions that several studies ask.

    Attributes:
      name: of its folder. suite: a name of ``kvjax.eval.suites.registry.SUITES``.
      tasks, length, limit: as of a suite; ``quick_tasks``, ``quick_length``, ``quick_limit`` with --quick.
      mode: when the question is asked.
    """

    name: str
    suite: str
    tasks: tuple[str, ...]
    length: int | None
    limit: int
    quick_tasks: tuple[str, ...]
    quick_length: int | None
    quick_limit: int
    mode: str = AFTER


@dataclasses.dataclass(frozen=True)
class Study:
    """One table or figure of a paper, measured here.

    Attributes:
      name: within its paper. title: the paper's table or figure, and what it shows.
      ground: the questions. caches: by the label of the paper, what is compared; the full cache is added.
      quick: labels that --quick measures; the others are left out then.
      beside: the paper's table and column that have the same labels, for a model that it measured too.
      differs: why numbers cannot be compared, or what differs from the paper.
    """

    name: str
    title: str
    ground: Ground
    caches: dict[str, Entry]
    quick: tuple[str, ...]
    differs: str
    beside: tuple[str, str] | None = None
    full: str = "full cache"

    def chosen(self, quick: bool) -> dict[str, Entry]:
        """Every row: the full cache, then what is compared."""
        kept = {label: cache for label, cache in self.caches.items() if not quick or label in self.quick}
        return {self.full: Entry(REFERENCE), **kept} if kept else {}


@dataclasses.dataclass(frozen=True)
class Paper:
    """One paper.

    Attributes:
      name: as typed in --tasks. title, arxiv: of the paper; arxiv may be empty.
      studies: what is measured. published: the paper's own numbers.
      missing: what the paper reports that has no counterpart here, and why.
    """

    name: str
    title: str
    arxiv: str
    studies: tuple[Study, ...]
    published: tuple[Published, ...]
    missing: tuple[str, ...]

    def table(self, source: str) -> Published:
        """The paper's table of that number."""
        return next(table for table in self.published if table.source == source)


_PLAIN = ("niah_single_1", "niah_multikey_2", "vt", "fwe")
#: RULER's tasks that need no text: needles in noise, among needles, tracked variables, frequent words.
NEEDLES = Ground("needles", "ruler", _PLAIN, 1024, 10, ("niah_single_1",), 640, 2)
NEEDLES_IN_VIEW = dataclasses.replace(NEEDLES, name="needles-in-view", mode=IN_VIEW)
#: One data set of each of LongBench's six groups.
_ENGLISH = ("multifieldqa_en", "2wikimqa", "multi_news", "triviaqa", "passage_retrieval_en", "lcc")
LONGBENCH = Ground("longbench", "longbench", _ENGLISH, 4096, 5, ("triviaqa",), 640, 1)
LONGBENCH_IN_VIEW = dataclasses.replace(LONGBENCH, name="longbench-in-view", mode=IN_VIEW)
PASSKEY = Ground("passkey", "passkey", ("passkey",), 2048, 1, ("passkey",), 640, 1)
SHORT = Ground("short", "short", ("openbookqa", "arc_easy", "wic", "winogrande"), 1024, 50, ("openbookqa",), 640, 4)
