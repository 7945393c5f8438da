"""The report of a suite: its tables, pictures and numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from kvjax.eval.entries import REFERENCE
from kvjax.eval.suites.bootstrap import RESAMPLES, Difference, Estimated, estimate
from kvjax.eval.suites.item import Suite
from kvjax.eval.suites.journal import RunSettings
from kvjax.eval.suites.metrics import ALSO
from kvjax.eval.suites.runner import IN_VIEW
from kvjax.eval.suites.scores import Line, as_data, prompt_tokens
from kvjax.tables import Column, Picture, Report, Table, counted, human_bytes, human_rate, measured_on

_LABELS = (
    Column("policy", "policy"),
    Column("retained", "retained", "{:g}".format, right=True),
)


def report(
    suite: Suite,
    settings: RunSettings,
    lines: Sequence[Line],
    machine: dict[str, Any],
    pictures: Sequence[Picture] = (),
    files: Sequence[str] = (),
) -> Report:
    """The whole result: tables, what their numbers are, the pictures' files, and everything measured as JSON."""
    parts: list[Table | Picture | str] = [_main(lines), _footnote(suite, settings, lines, machine, files), *pictures]
    answered = [line for line in lines if line.scored]
    tasks = list(dict.fromkeys(one.item.task for line in answered for one in line.scored))
    if len(tasks) > 1:
        parts.append(_by_name("By task", answered, [(task, task) for task in tasks], settings.seed))
    groups = sorted({group for line in answered for one in line.scored for group in one.item.groups})
    if groups:
        parts.append(_by_name("By group", answered, [(group, group) for group in groups], settings.seed))
    data = {
        "suite": suite.name,
        "settings": dataclasses.asdict(settings),
        "machine": machine,
        "files": list(files),
        "caches": [as_data(line, settings.seed) for line in lines],
    }
    return Report(parts, data)


def _main(lines: Sequence[Line]) -> Table:
    second = next((ALSO[one.item.metric] for line in lines for one in line.scored if one.also is not None), None)
    columns = [
        *_LABELS,
        Column("answered", lambda line: f"{len(line.scored)} of {line.questions}", right=True),
        Column("score", lambda line: estimate_text(line.score), right=True),
        *([Column(second, lambda line: estimate_text(line.also), right=True)] if second else []),
        Column("against full", "gap", difference_text, missing="-", right=True),
        Column("p", "gap", lambda gap: f"{gap.p:.3f}", missing="-", right=True),
        Column("live", lambda line: line.mean(lambda answer: answer.live_bytes), human_bytes, "-", right=True),
        Column(
            "allocated", lambda line: line.mean(lambda answer: answer.allocated_bytes), human_bytes, "-", right=True
        ),
        Column("of full", "live_fraction", "{:.1%}".format, "-", right=True),
        Column("prefill tokens/s", "read_rate", human_rate, right=True),
        Column("decode tokens/s", "decode_rate", human_rate, right=True),
    ]
    return Table(columns, lines, note=lambda line: line.refused, labels=len(_LABELS))


def estimate_text(found: Estimated | None) -> str:
    """A mean in percent with its standard error; a dash without any."""
    if found is None or math.isnan(found.mean):
        return "-"
    return f"{100 * found.mean:.1f}" + ("" if math.isnan(found.error) else f" ± {100 * found.error:.1f}")


def difference_text(found: Difference) -> str:
    """A paired difference in percent points with its standard error."""
    return f"{100 * found.mean:+.1f} ± {100 * found.error:.1f}"


def _by_name(title: str, lines: Sequence[Line], names: Sequence[tuple[str, str]], seed: int) -> Table:
    """Scores of the answers of each task or group: of a group the mean of its tasks, as the score of all is."""

    def cell(line: Line, name: str) -> str:
        values: dict[str, list[float]] = {}
        for one in line.scored:
            if name == one.item.task or name in one.item.groups:
                values.setdefault(one.item.task, []).append(one.score)
        return estimate_text(estimate(values, seed))

    columns = [Column(shown, lambda line, name=name: cell(line, name), right=True) for name, shown in names]
    return Table([*_LABELS, *columns], lines, title=title, labels=len(_LABELS))


def _without_reference(lines: Sequence[Line]) -> str:
    """How many questions have an empty reference, if any: what such a question scores says nothing of a cache."""
    items = {one.item.id: one.item for line in lines for one in line.scored}
    count = sum(not any(answer.strip() for answer in item.answers) for item in items.values())
    if not count:
        return ""
    having = counted(count, "question has", "questions have")
    return f" {having} an empty reference: as by the benchmark's own code, words score 0 there."


def _footnote(
    suite: Suite, settings: RunSettings, lines: Sequence[Line], machine: dict[str, Any], files: Sequence[str]
) -> str:
    asked = (
        "The context was compressed with the question in view."
        if settings.mode == IN_VIEW
        else "The context was compressed first, and the question read after it."
    )
    stored = "" if settings.storage == "model" else f" Keys and values are stored as {settings.storage}."
    prompts = prompt_tokens(lines)
    length = f" Prompts have {prompts}." if prompts else ""
    read = f" Text: {', '.join(files)}." if files else ""
    return (
        f"{suite.title}. {settings.model}, seed {settings.seed}. {asked}{stored}{length}{read} "
        f"{suite.about}{_without_reference(lines)} "
        f"Scores are percent ± standard errors; against {REFERENCE}: the mean difference of the same questions, and p, "
        f"its significance ({RESAMPLES:,} paired resamples of each task's questions). Live, allocated and of full "
        f"(live): a question's cache when its answer is complete. Speeds: {counted(settings.batch_size, 'prompt')} at "
        f"a time at most, compilation apart. {measured_on(machine)}."
    )
