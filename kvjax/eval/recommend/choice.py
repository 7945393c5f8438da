"""Chooses among what was measured, and says so: a sentence, a table, a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvjax.eval.entries import REFERENCE
from kvjax.eval.pictures import plain_axes
from kvjax.eval.recommend.measure import Measured
from kvjax.figures import new_figure
from kvjax.policies import format_policy, parse
from kvjax.tables import Column, Picture, Report, Table, human_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Needles that a cache must find, of those that the full cache finds, to be chosen by its loss.
_NEEDLES = 0.9


@dataclasses.dataclass(frozen=True)
class Goal:
    """The goal of a recommendation: a largest number of bytes, or a largest increase of the full cache's loss.

    Attributes:
      budget: bytes, or None. loss: 0.01 for a hundredth more, or None. Neither stands for a loss of 0.01.
    """

    budget: int | None = None
    loss: float | None = None

    @property
    def most_loss(self) -> float:
        return 0.01 if self.loss is None else self.loss


def more_loss(row: Measured, full: Measured) -> float:
    """The part of the full cache's loss that is added."""
    return row.loss / full.loss - 1


def choose(rows: Sequence[Measured], goal: Goal) -> Measured | None:
    """The best cache for the goal, or None where none meets it.

    Within a budget: that which finds most needles; of equal ones that of least loss, then the smaller. By loss: the
    smallest within it, smaller than the full cache, which finds 0.9 of its needles.
    """
    (full,) = (row for row in rows if row.policy == REFERENCE)
    measured = [row for row in rows if row.refused is None]
    if goal.budget is not None:
        fitting = [row for row in measured if row.cache_bytes <= goal.budget]
        return min(fitting, key=lambda row: (-row.accuracy, row.loss, row.cache_bytes), default=None)
    good = [
        row
        for row in measured
        if more_loss(row, full) <= goal.most_loss
        and row.accuracy >= _NEEDLES * full.accuracy
        and row.cache_bytes < full.cache_bytes
    ]
    return min(good, key=lambda row: (row.cache_bytes, row.loss), default=None)


def sentence(rows: Sequence[Measured], goal: Goal) -> str:
    """The recommendation, in one or two sentences with the flag to copy."""
    (full,) = (row for row in rows if row.policy == REFERENCE)
    best = choose(rows, goal)
    if best is None:
        if goal.budget is not None:
            return f"No cache that was measured is within {human_bytes(goal.budget)}; measure smaller --retained."
        return (
            f"No smaller cache that was measured stays within {100 * goal.most_loss:.3g}% of the full cache's loss and "
            "finds its needles; keep the full one, or allow more --loss."
        )
    if best is full:
        return f"Use --policy full: its cache is within {human_bytes(goal.budget or 0)}."
    blind = "" if full.accuracy else " The full cache finds no needle either, so the loss alone decided."
    return (
        f"Use --policy {flag(best)}: {human_bytes(best.cache_bytes)} instead of {human_bytes(full.cache_bytes)} "
        f"({best.cache_bytes / full.cache_bytes:.0%}), {best.accuracy:.0%} of the needles ({full.accuracy:.0%} with "
        f"the full cache), and {more_loss(best, full):+.1%} loss.{blind}"
    )


def flag(row: Measured) -> str:
    """The policy as ``--policy`` takes it, without what is its default."""
    return format_policy(parse(row.policy))


def _rank(row: Measured, full: Measured) -> tuple[Any, ...]:
    """The place in a table: the full cache, then by needles and loss, then what was refused."""
    if row.refused is not None:
        return 2, 0.0, 0.0, row.policy
    return int(row is not full), -row.accuracy, row.loss, row.policy


def report(rows: Sequence[Measured], goal: Goal, facts: Sequence[str], picture: str | None = None) -> Report:
    """The sentence, the table, best first, and what was measured."""
    (full,) = (row for row in rows if row.policy == REFERENCE)
    ordered = sorted(rows, key=lambda row: _rank(row, full))
    columns = [
        Column("policy", "policy"),
        Column("cache", "cache_bytes", human_bytes, right=True),
        Column("of full", lambda row: row.cache_bytes / full.cache_bytes, "{:.1%}".format, right=True),
        Column("needles", "accuracy", "{:.0%}".format, right=True),
        Column("loss", "loss", "{:.3f}".format, right=True),
        Column("more loss", lambda row: more_loss(row, full), "{:+.1%}".format, right=True),
    ]
    shown: list[Table | Picture | str] = [sentence(rows, goal)]
    shown.append(Table(columns, ordered, note=lambda row: row.refused, labels=1))
    shown += [f"{flag(row)}: {row.notice}" for row in ordered if row.notice is not None]
    if picture is not None:
        shown.append(Picture("Loss and needles against the bytes of each cache", picture))
    best = choose(rows, goal)
    data: dict[str, Any] = {
        "recommended": None if best is None else flag(best),
        "goal": dataclasses.asdict(goal),
        "facts": list(facts),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    return Report([*shown, *facts], data)


def figure(rows: Sequence[Measured], goal: Goal, measured_tokens: int, context: int) -> Figure:
    """Loss, and needles found, against the bytes of each cache; the chosen one has a ring.

    Args:
      measured_tokens: of the longest passage. context: tokens of the prompts whose caches have these bytes.
    """
    (full,) = (row for row in rows if row.policy == REFERENCE)
    best = choose(rows, goal)
    measured = [row for row in rows if row.refused is None]
    drawn = new_figure(12, 4.6)
    left, right, names = drawn.subplots(1, 3, width_ratios=(4, 4, 3))
    panels = (
        (left, lambda row: 100 * more_loss(row, full), "more loss than the full cache, %"),
        (right, lambda row: 100 * row.accuracy, "needles found, %"),
    )
    for axes, value, label in panels:
        numbers: dict[tuple[float, float], list[str]] = {}
        for number, row in enumerate(measured, 1):
            place = (row.cache_bytes / 1e6, value(row))
            numbers.setdefault(place, []).append(str(number))
            axes.scatter(*place, color="#555555" if row is full else "#4477aa", s=22, zorder=2)
            if row is best:
                axes.scatter(*place, s=150, facecolors="none", edgecolors="#ee7733", linewidths=1.8, zorder=3)
        for place, there in numbers.items():
            axes.annotate(", ".join(there), place, xytext=(4, 3), textcoords="offset points", fontsize=7)
        plain_axes(axes, f"cache of prompts of {context:,} tokens, MB", label)
        axes.set_title(f"passages of at most {measured_tokens:,} tokens", fontsize=10)
        if goal.budget is not None:
            axes.axvline(goal.budget / 1e6, color="#ee7733", linewidth=0.8, linestyle="--")
    left.axhline(0, color="#555555", linewidth=0.8)
    if goal.budget is None:
        left.axhline(100 * goal.most_loss, color="#ee7733", linewidth=0.8, linestyle="--")
    right.set_ylim(-4, 104)
    names.axis("off")
    listed = "\n".join(f"{number}  {row.policy}" for number, row in enumerate(measured, 1))
    names.text(0, 1, listed, fontsize=7.5, va="top", ha="left", transform=names.transAxes)
    return drawn
