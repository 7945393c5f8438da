"""The report of a comparison: its tables, the footnote, and the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvjax.eval import results
from kvjax.eval.entries import REFERENCE
from kvjax.eval.follow_ups import TURNS
from kvjax.eval.results import AFTER, IN_VIEW, Estimate, Row, Settings, accuracy, first_token_agreement
from kvjax.tables import Column, Picture, Report, Table, counted, human_bytes, human_rate, measured_on


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By length, the reference first, then by policy in the order measured, the largest fraction first."""
    order = {name: place for place, name in enumerate(dict.fromkeys(row.policy for row in rows))}
    order[REFERENCE] = -1
    return sorted(rows, key=lambda row: (row.length, order[row.policy], -(row.retained or 0)))


def reference_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The full cache's row of the same length."""
    found = (other for other in rows if other.length == row.length and other.policy == REFERENCE)
    return next((other for other in found if other.refused is None), None)


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The table's numbers, a dict a row; an estimate is a mean and its standard error (None for what is not known)."""
    return [_numbers(row, reference_of(row, rows)) for row in in_order(rows)]


def _numbers(row: Row, reference: Row | None) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens": row.length, "policy": row.policy, "retained": row.retained}
    if row.refused is not None:
        return found | {"refused": row.refused}
    tasks = list(dict.fromkeys(group.task for group in row.scored(AFTER)))
    for mode in (AFTER, IN_VIEW):
        found[mode] = _pair(accuracy(row, mode))
        found[f"{mode}, by task"] = {task: _pair(accuracy(row, mode, task)) for task in tasks}
        agrees = Estimate(math.nan, math.nan) if reference is None else first_token_agreement(row, reference, mode)
        found[f"{mode}, first token as {REFERENCE}"] = _pair(agrees)
    for turn in TURNS:
        found[turn] = _pair(accuracy(row, turn))
    names = ("live_bytes", "allocated_bytes", "full_bytes", "prefill_tokens_per_second", "decode_tokens_per_second")
    return found | {name: getattr(row, name) for name in names} | {"live_share": row.live_fraction}


def _pair(found: Estimate) -> dict[str, float | None]:
    """JSON has no NaN."""
    return {
        "mean": None if math.isnan(found.mean) else found.mean,
        "error": None if math.isnan(found.error) else found.error,
    }


def table(numbers: Sequence[dict[str, Any]]) -> Table:
    """The main table of a summary; a refused cache says why under "asked after"."""
    columns = (
        *_LABELS,
        *(Column(name, mode, _estimate) for name, mode in (("asked after", AFTER), ("in view", IN_VIEW))),
        Column("first token", _agreement),
        *(Column(turn, turn, _estimate) for turn in TURNS),
        Column("live", "live_bytes", human_bytes),
        Column("allocated", "allocated_bytes", human_bytes),
        Column("of full", "live_share", "{:.1%}".format),
        Column("prefill tokens/s", "prefill_tokens_per_second", human_rate),
        Column("decode tokens/s", "decode_tokens_per_second", human_rate),
    )
    return Table(columns, numbers, note=lambda row: row.get("refused"), labels=len(_LABELS))


_LABELS = (Column("tokens", "tokens"), Column("policy", "policy"), Column("retained", "retained", "{:g}".format))


def _agreement(row: dict[str, Any]) -> str:
    means = [row[f"{mode}, first token as {REFERENCE}"]["mean"] for mode in (AFTER, IN_VIEW)]
    return " / ".join("-" if mean is None else f"{mean:.2f}" for mean in means)


def _estimate(found: dict[str, float | None]) -> str:
    if found["mean"] is None:
        return "-"
    return f"{found['mean']:.2f}" + ("" if found["error"] is None else f" ± {found['error']:.2f}")


def by_task(numbers: Sequence[dict[str, Any]]) -> Table:
    """The accuracy of each task, of the caches that have answers."""
    answered = [row for row in numbers if "refused" not in row]
    tasks = list(dict.fromkeys(task for row in answered for task in row[f"{AFTER}, by task"]))
    accuracies = [
        Column(f"{task}, {mode}", lambda row, mode=mode, task=task: _estimate(row[f"{mode}, by task"][task]))
        for task in tasks
        for mode in (AFTER, IN_VIEW)
    ]
    return Table([*_LABELS, *accuracies], answered, labels=len(_LABELS))


def footnote(settings: Settings, machine: dict[str, Any]) -> str:
    """The sentences that say what the numbers are, and where they come from."""
    turns = ""
    if settings.turns:
        turns = (
            f" {', '.join(TURNS)}: three questions of a conversation over one cache, the first in view of the "
            "compression, the second about the same key, the third about another."
        )
    stored = "" if settings.storage == "model" else f", rows stored as {settings.storage}"
    return (
        f"{settings.model}, {settings.dtype}{stored}; {counted(settings.samples, 'sample')} each of "
        f"{', '.join(settings.tasks)} (mean over tasks ± standard error), seed {settings.seed}. Asked after: the "
        "context is compressed before the question is known; in view: with it. First token: fraction of answers whose "
        f"first token is the full cache's, asked after / in view.{turns} Live, allocated and of full (live): a "
        "sample's cache when its answer begins, asked after. Prefill: one prompt, once a policy; decode: "
        f"{counted(settings.samples, 'row', 'rows together')}. "
        f"{measured_on(machine)}."
    )


def report(settings: Settings, rows: Sequence[Row], machine: dict[str, Any], picture: str | None = None) -> Report:
    """The whole result: tables, what their numbers are, the picture's file, and everything measured as JSON."""
    numbers = summary(rows)
    parts: list[Table | Picture | str] = [table(numbers), footnote(settings, machine)]
    if picture is not None:
        parts.append(Picture("Accuracy against bytes", picture))
    if any(row.refused is None for row in rows):
        parts += ["By task:", by_task(numbers)]
    return Report(parts, results.as_json(settings, rows, machine, numbers))
