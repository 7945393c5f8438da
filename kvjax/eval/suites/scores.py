"""The numbers of a report: scores of every cache, differences from the full one, bytes and speed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvjax.eval.entries import REFERENCE, Entry
from kvjax.eval.suites.bootstrap import Difference, Estimated, difference, estimate
from kvjax.eval.suites.item import Item
from kvjax.eval.suites.journal import Answer, Journal
from kvjax.eval.suites.metrics import ALSO, score


@dataclasses.dataclass(frozen=True)
class Scored:
    """One answer with its score."""

    item: Item
    answer: Answer
    score: float
    also: float | None


@dataclasses.dataclass(frozen=True)
class Line:
    """One cache's results.

    Attributes:
      scored: its answers in the order of the questions. questions: how many there are.
      score: mean of the tasks' means, 0 to 1. also: the same of a second metric.
      gap: paired difference from the full cache over the questions that both answered.
      refused: why it has no answers, or None.
    """

    policy: str
    retained: float | None
    scored: tuple[Scored, ...]
    questions: int
    score: Estimated
    also: Estimated | None
    gap: Difference | None
    refused: str | None = None

    def mean(self, value: Callable[[Answer], float]) -> float | None:
        """The mean of a number over the answers."""
        values = [value(one.answer) for one in self.scored]
        return math.fsum(values) / len(values) if values else None

    @property
    def live_fraction(self) -> float | None:
        """Live bytes over those of a full cache."""
        full = math.fsum(one.answer.full_bytes for one in self.scored)
        return math.fsum(one.answer.live_bytes for one in self.scored) / full if full else None

    @property
    def read_rate(self) -> float:
        """Prompt tokens a second."""
        answers = [one.answer for one in self.scored]
        read = [one.prompt_tokens if one.read_tokens is None else one.read_tokens for one in answers]
        return _rate(zip(read, (one.read_seconds for one in answers), strict=True))

    @property
    def decode_rate(self) -> float:
        """Generated tokens a second, the first of each answer apart; rows of a batch together."""
        return _rate((max(one.answer.tokens - 1, 0), one.answer.decode_seconds) for one in self.scored)


def span(least: int, most: int) -> str:
    """A range of whole numbers, as text."""
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def prompt_tokens(lines: Sequence[Line]) -> str:
    """How many tokens the prompts have that were answered, such as "1,013 to 1,020 tokens"; empty without any."""
    prompts = [one.answer.prompt_tokens for line in lines for one in line.scored]
    return f"{span(min(prompts), max(prompts))} tokens" if prompts else ""


def _rate(pairs: Iterable[tuple[float, float]]) -> float:
    counts, seconds = zip(*pairs, strict=True) if (pairs := list(pairs)) else ((), ())
    spent = math.fsum(seconds)
    return math.fsum(counts) / spent if spent > 0 else 0.0


def by_task(scored: Sequence[Scored], value: Callable[[Scored], float]) -> dict[str, list[float]]:
    """Values of each task's answers."""
    found: dict[str, list[float]] = {}
    for one in scored:
        found.setdefault(one.item.task, []).append(value(one))
    return found


def paired(one: Sequence[Scored], other: Sequence[Scored]) -> dict[str, list[tuple[float, float]]]:
    """Scores of the questions that both answered, by task."""
    held = {scored.item.id: scored.score for scored in other}
    found: dict[str, list[tuple[float, float]]] = {}
    for scored in one:
        if scored.item.id in held:
            found.setdefault(scored.item.task, []).append((scored.score, held[scored.item.id]))
    return found


def lines(
    items: Sequence[Item],
    journal: Journal,
    entries: Sequence[Entry],
    refused: dict[tuple[str, float | None], str],
) -> list[Line]:
    """A line of every cache: those asked for now, then others whose answers the journal holds; the full one first."""
    keys = [(entry.name, entry.retained) for entry in entries]
    keys = list(dict.fromkeys([*keys, *((answer.policy, answer.retained) for answer in journal.answers.values())]))
    keys.sort(key=lambda key: key[0] != REFERENCE)
    seed = journal.settings.seed
    found: list[Line] = []
    for key in keys:
        scored = tuple(_scored(item, answer) for item in items if (answer := journal.answers.get((*key, item.id))))
        also = None
        if scored and all(one.also is not None for one in scored):
            also = estimate(by_task(scored, lambda one: one.also or 0.0), seed)
        gap = None
        if found and found[0].policy == REFERENCE and key[0] != REFERENCE:
            gap = difference(paired(scored, found[0].scored), seed)
        mean = estimate(by_task(scored, lambda one: one.score), seed)
        found.append(Line(*key, scored, len(items), mean, also, gap, refused.get(key) if not scored else None))
    return found


def _scored(item: Item, answer: Answer) -> Scored:
    second = ALSO.get(item.metric)
    return Scored(item, answer, score(answer.text, item), None if second is None else score(answer.text, item, second))


def as_data(line: Line, seed: int) -> dict[str, Any]:
    """A line's numbers, JSON-ready: scores in percent, NaN as None."""
    tasks = by_task(line.scored, lambda one: one.score)
    return {
        "policy": line.policy,
        "retained": line.retained,
        "refused": line.refused,
        "answered": len(line.scored),
        "questions": line.questions,
        "score": _percent(line.score),
        "second score": None if line.also is None else _percent(line.also),
        "difference": None if line.gap is None else _gap(line.gap),
        "by task": {task: _percent(estimate({task: values}, seed)) for task, values in tasks.items()},
        "live_bytes": line.mean(lambda answer: answer.live_bytes),
        "allocated_bytes": line.mean(lambda answer: answer.allocated_bytes),
        "full_bytes": line.mean(lambda answer: answer.full_bytes),
        "live_share": line.live_fraction,
        "prefill_tokens_per_second": line.read_rate,
        "decode_tokens_per_second": line.decode_rate,
        "answers": [{"question": one.item.id, "score": one.score, "second score": one.also} for one in line.scored],
    }


def _percent(found: Estimated) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else 100 * value for name, value in dataclasses.asdict(found).items()}


def _gap(found: Difference) -> dict[str, float]:
    values = dataclasses.asdict(found)
    return {name: value if name == "p" else 100 * value for name, value in values.items()}
