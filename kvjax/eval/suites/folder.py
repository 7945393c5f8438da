"""The folder of a run: its journal, and the report made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.eval.suites.figures import heat_map, scores_figure, task_figure
from kvjax.eval.suites.item import Suite
from kvjax.eval.suites.journal import RunSettings
from kvjax.eval.suites.page import page
from kvjax.eval.suites.scores import Line
from kvjax.eval.suites.suite_report import report
from kvjax.figures import png
from kvjax.files import write_atomically
from kvjax.tables import Picture, Report

JOURNAL, PAGE, MARKDOWN, NUMBERS = "answers.jsonl", "report.html", "report.md", "report.json"


def write(
    out: Path,
    suite: Suite,
    settings: RunSettings,
    lines: Sequence[Line],
    machine: dict[str, Any],
    files: Sequence[str] = (),
) -> Report:
    """Write report.html, report.md with its pictures beside it, and report.json.

    Args:
      files: names of the files that the questions are of.
    """
    drawn = _pictures(suite, lines)
    shown = [Picture(caption, name) for name, (caption, _) in drawn.items()]
    found = report(suite, settings, lines, machine, shown, files)
    images = {name: image for name, (_, image) in drawn.items()}
    write_files(out, found, f"{suite.title} ({settings.model})", images)
    return found


def write_files(out: Path, found: Report, title: str, images: Mapping[str, bytes]) -> None:
    """Write a report as a page, as Markdown and as JSON, with the PNG files that it shows."""
    texts = {PAGE: page(found, title, images), MARKDOWN: f"# {title}\n\n{found.markdown()}", NUMBERS: found.json()}
    out.mkdir(parents=True, exist_ok=True)
    for name, content in {**images, **texts}.items():
        write_atomically(out / name, content)


def _pictures(suite: Suite, lines: Sequence[Line]) -> dict[str, tuple[str, bytes]]:
    """Caption and PNG of each picture, by its file's name."""
    if not any(line.scored for line in lines):
        return {}
    found = {}
    if suite.heat_map:
        length = "text around the key, words" if suite.name == "passkey" else "prompt with answer, tokens"
        found["heat-map.png"] = "Score by length and depth", png(heat_map(lines, length))
    if len({one.item.task for line in lines for one in line.scored}) > 1:
        found["tasks.png"] = "Score of each task", png(task_figure(lines))
    if sum(bool(line.scored) for line in lines) > 1:
        found["scores.png"] = "Score against live bytes", png(scores_figure(lines))
    return found
