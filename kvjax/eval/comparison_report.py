"""A comparison as one table: for people, as Markdown, and as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvjax.eval.candidates import REFERENCE
from kvjax.eval.follow_ups import TURNS
from kvjax.eval.results import AFTER, IN_VIEW, Estimate, Row, Settings, accuracy, first_token_agreement
from kvjax.tables import human_bytes, human_rate

COLUMNS = (
    "tokens",
    "policy",
    "retained",
    "asked after",
    "in view",
    "first token",
    *TURNS,
    "live",
    "allocated",
    "of full",
    "prefill tokens/s",
    "decode tokens/s",
)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By length, the reference first, then by policy in the order measured, shares from large to small."""
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
    return found | {name: getattr(row, name) for name in names} | {"live_share": row.live_share}


def _pair(found: Estimate) -> dict[str, float | None]:
    """JSON has no NaN."""
    return {
        "mean": None if math.isnan(found.mean) else found.mean,
        "error": None if math.isnan(found.error) else found.error,
    }


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Cells under ``COLUMNS``; a refused cache says why under "asked after"."""
    return [_cells(numbers) for numbers in summary(rows)]


def _cells(numbers: dict[str, Any]) -> list[str]:
    retained = "" if numbers["retained"] is None else f"{numbers['retained']:g}"
    start = [str(numbers["tokens"]), numbers["policy"], retained]
    if "refused" in numbers:
        return [*start, numbers["refused"]] + [""] * (len(COLUMNS) - 4)
    agrees = [numbers[f"{mode}, first token as {REFERENCE}"]["mean"] for mode in (AFTER, IN_VIEW)]
    return [
        *start,
        *(_estimate(numbers[mode]) for mode in (AFTER, IN_VIEW)),
        " / ".join("-" if share is None else f"{share:.2f}" for share in agrees),
        *(_estimate(numbers[turn]) for turn in TURNS),
        human_bytes(numbers["live_bytes"]),
        human_bytes(numbers["allocated_bytes"]),
        f"{numbers['live_share']:.1%}",
        human_rate(numbers["prefill_tokens_per_second"]),
        human_rate(numbers["decode_tokens_per_second"]),
    ]


def _estimate(found: dict[str, float | None]) -> str:
    if found["mean"] is None:
        return "-"
    return f"{found['mean']:.2f}" + ("" if found["error"] is None else f" ± {found['error']:.2f}")


def by_task(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of the accuracy of each task, of the rows that have answers."""
    found = [numbers for numbers in summary(rows) if "refused" not in numbers]
    tasks = list(dict.fromkeys(task for numbers in found for task in numbers[f"{AFTER}, by task"]))
    columns = ["tokens", "policy", "retained", *(f"{task}, {mode}" for task in tasks for mode in (AFTER, IN_VIEW))]
    cells = [
        _cells(numbers)[:3]
        + [_estimate(numbers[f"{mode}, by task"][task]) for task in tasks for mode in (AFTER, IN_VIEW)]
        for numbers in found
    ]
    return columns, cells


def footnote(settings: Settings, machine: dict[str, Any]) -> str:
    """What the numbers are, and where they come from."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    turns = ""
    if settings.turns:
        turns = (
            f" {', '.join(TURNS)}: three questions of a conversation over one cache, the first in view of the "
            "compression, the second about the same key, the third about another."
        )
    stored = "" if settings.storage == "model" else f", rows stored as {settings.storage}"
    return (
        f"{settings.model}, {settings.dtype}{stored}; {settings.samples} samples each of {', '.join(settings.tasks)} "
        f"(mean over tasks ± standard error), seed {settings.seed}. Asked after: the context is compressed before the "
        "question is known; in view: with it. First token: share of answers whose first token is the full cache's, "
        f"asked after / in view.{turns} Live, allocated and of full (live): a sample's cache when its answer begins, "
        f"asked after. Prefill: one prompt, once a policy; decode: {settings.samples} rows together. "
        f"{machine['processor']}, {machine['cores']} cores; {versions}; {machine['date'][:10]}."
    )


def markdown(settings: Settings, rows: Sequence[Row], machine: dict[str, Any], picture: str | None = None) -> str:
    """The whole result as Markdown."""
    parts = [markdown_table(COLUMNS, table(rows)), footnote(settings, machine)]
    if picture is not None:
        parts.append(f"![Accuracy against bytes]({picture})")
    if any(row.refused is None for row in rows):
        parts += ["By task:", markdown_table(*by_task(rows))]
    return "\n\n".join(parts) + "\n"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
