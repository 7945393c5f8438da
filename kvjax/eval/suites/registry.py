"""The suites by name, and what one of them is asked for."""

from __future__ import annotations

from kvjax.checks import MOST_SEED, whole_number
from kvjax.errors import UsageError, listed, quoted
from kvjax.eval.suites.data import DataFolder
from kvjax.eval.suites.dialogues import DIALOGUES
from kvjax.eval.suites.item import Asked, Suite
from kvjax.eval.suites.longbench import LONGBENCH
from kvjax.eval.suites.longbench_v2 import LONGBENCH_V2
from kvjax.eval.suites.longmemeval import LONGMEMEVAL
from kvjax.eval.suites.needle_map import NEEDLE_MAP
from kvjax.eval.suites.passkey import PASSKEY
from kvjax.eval.suites.ruler_suite import RULER
from kvjax.eval.suites.scbench import SCBENCH, SCBENCH_REQUESTS
from kvjax.eval.suites.short import SHORT
from kvjax.eval.suites.topics import ROUNDS

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        RULER,
        PASSKEY,
        NEEDLE_MAP,
        LONGBENCH,
        LONGBENCH_V2,
        LONGMEMEVAL,
        SCBENCH,
        SCBENCH_REQUESTS,
        ROUNDS,
        DIALOGUES,
        SHORT,
    )
}


def find_suite(name: str) -> Suite:
    """The suite of that name; UsageError names the known ones."""
    if name not in SUITES:
        raise UsageError(f"There is no suite {quoted(name)}; known are {', '.join(SUITES)}, papers.")
    return SUITES[name]


def asked_of(
    suite: Suite,
    data: DataFolder,
    *,
    tasks: tuple[str, ...] = (),
    length: int | None = None,
    limit: int | None = None,
    seed: int = 42,
    quick: bool = False,
) -> Asked:
    """The checked request of a suite, with the suite's own numbers where none are given.

    Raises:
      UsageError: a task it has not, a number out of range, or text that is missing.
    """
    for name, value in (("--length", length), ("--limit", limit)):
        if value is not None:
            whole_number(name, value, 1)
    whole_number("--seed", seed, 0, MOST_SEED)
    for task in tasks:
        if task not in suite.tasks:
            raise UsageError(f"The suite {suite.name} has no task {quoted(task)}; it has {listed(suite.tasks, 200)}.")
    if len(set(tasks)) < len(tasks):
        raise UsageError("A task is named twice; name each once.")
    own_length, own_limit = (suite.quick_length, suite.quick_limit) if quick else (suite.length, suite.limit)
    chosen = Asked(
        tasks=tasks or suite.tasks,
        length=own_length if length is None else length,
        limit=own_limit if limit is None else limit,
        seed=seed,
        quick=quick,
    )
    suite.check(data, chosen)
    return chosen
