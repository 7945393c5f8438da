"""One question of a suite about one context, and a suite's description."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax.checkpoints.load import LanguageModel
    from kvjax.eval.suites.data import DataFolder


@dataclasses.dataclass(frozen=True)
class Item:
    """One question about one context.

    Attributes:
      id: its name, which no other of the suite has.
      task: the part of the suite whose scores are averaged together.
      context: what can be compressed before the question is known.
      question: asked after it. ``answer_prefix``: the answer's beginning, with its leading space, given to the model.
      answers: the references, as the metric reads them.
      metric: a name of ``kvjax.eval.suites.metrics.METRICS``.
      max_new_tokens: of the answer.
      chat: whether the model's chat template is applied, where it has one.
      classes: the names that a classification chooses from.
      earlier: earlier turns of the same dialogue, each a question and its reference answer, which are read onto the
        compressed context one after another, as a chat's turns are.
      shares: a name that items have in common which can go on from each other's caches, in their order; empty for an
        item that stands alone.
      choices: continuations whose log-probabilities are taken; nothing is generated where there are any, and
        ``max_new_tokens`` is 0. ``answers`` are then the numbers of the right ones, from "0".
      cell: (length, depth) in a heat map, or None.
      groups: names under which the item also counts, such as its difficulty.
    """

    id: str
    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    answer_prefix: str = ""
    chat: bool = True
    classes: tuple[str, ...] = ()
    cell: tuple[float, float] | None = None
    groups: tuple[str, ...] = ()
    earlier: tuple[tuple[str, str], ...] = ()
    shares: str = ""
    choices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Asked:
    """The tasks, length and limits that a run asks of a suite.

    Attributes:
      tasks: names of the suite's tasks.
      length: tokens of the longest prompt with its answer; None where the suite's own lengths stay.
      limit: questions of a task, or of a cell of a heat map; None for all.
      seed: of what is drawn.
      quick: whether grids are small.
    """

    tasks: tuple[str, ...]
    length: int | None = None
    limit: int | None = None
    seed: int = 42
    quick: bool = False


@dataclasses.dataclass(frozen=True)
class Suite:
    """One benchmark.

    Attributes:
      name: as typed. title: a line about it.
      tasks: every task, in the benchmark's order. about: what the report says of how it is scored.
      items: the questions, of a loaded model whose tokenizer counts.
      check: refuses (UsageError) before the model loads what would be refused later: above all missing text.
      length, limit: what is asked for where nothing is typed, less than an hour of the default model and caches on two
        cores; ``quick_length``, ``quick_limit`` with --quick, ten minutes.
      heat_map: whether items have cells.
    """

    name: str
    title: str
    tasks: tuple[str, ...]
    about: str
    items: Callable[[LanguageModel, DataFolder, Asked], list[Item]]
    check: Callable[[DataFolder, Asked], Any]
    length: int | None = None
    limit: int | None = None
    quick_length: int | None = 1024
    quick_limit: int | None = 2
    heat_map: bool = False


def limited(items: Sequence[Item], limit: int | None) -> list[Item]:
    """The first ``limit`` items of each task."""
    counts: dict[str, int] = {}
    kept = []
    for item in items:
        counts[item.task] = counts.get(item.task, 0) + 1
        if limit is None or counts[item.task] <= limit:
            kept.append(item)
    return kept
