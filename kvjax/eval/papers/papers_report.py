"""The report of the papers: what is measured here, and each paper's own numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.eval.papers.extras import Extra
from kvjax.eval.papers.measured import Measured, Options
from kvjax.eval.papers.paper import Paper, Published, Study
from kvjax.eval.suites.figures import scores_figure
from kvjax.eval.suites.folder import write_files
from kvjax.eval.suites.metrics import ALSO
from kvjax.eval.suites.runner import IN_VIEW
from kvjax.eval.suites.scores import Line, as_data, lines
from kvjax.eval.suites.suite_report import difference_text, estimate_text
from kvjax.figures import png
from kvjax.tables import Column, Heading, Picture, Report, Table, counted, human_bytes, human_rate, measured_on

TITLE = "The papers' tables and figures"


@dataclasses.dataclass(frozen=True)
class Row:
    """One cache of a study.

    Attributes:
      label: the paper's. line: what is measured. agrees: the fraction of first tokens that are the full cache's.
      paper: its own number, where it measured this model.
    """

    label: str
    line: Line
    agrees: float | None
    paper: str | None


def rows_of(study: Study, measured: Measured, model: str, paper: Paper, quick: bool) -> list[Row]:
    """A study's rows, the full cache first; those without answers are among them, with what refused them."""
    assert measured.journal is not None, "the ground was asked"
    found = lines(measured.items, measured.journal, measured.caches, measured.refused)
    of_cache = {(line.policy, line.retained): line for line in found}
    table, column = (paper.table(study.beside[0]), study.beside[1]) if study.beside else (None, "")
    rows, first = [], {}
    for number, (label, cache) in enumerate(study.chosen(quick).items()):
        line = of_cache[cache.name, cache.retained]
        firsts = {one.item.id: one.answer.first_token for one in line.scored if one.answer.first_token is not None}
        first = firsts if number == 0 else first
        both = [firsts[item] == first[item] for item in firsts if item in first]
        agrees = sum(both) / len(both) if both else None
        rows.append(Row(label, line, agrees, table.value(model, label, column) if table else None))
    return rows


def study_table(study: Study, rows: Sequence[Row]) -> Table:
    """The table of a study."""
    also = next((ALSO[one.item.metric] for row in rows for one in row.line.scored if one.also is not None), None)
    columns = [
        Column("", "label"),
        Column("answered", lambda row: f"{len(row.line.scored)} of {row.line.questions}", right=True),
        Column("score", lambda row: estimate_text(row.line.score), right=True),
        *([Column(also, lambda row: estimate_text(row.line.also), right=True)] if also else []),
        *([Column("the paper's", "paper", missing="-", right=True)] if any(row.paper for row in rows) else []),
        Column("against full", lambda row: row.line.gap, difference_text, "-", right=True),
        Column("p", lambda row: row.line.gap, lambda gap: f"{gap.p:.3f}", "-", right=True),
        Column("first token as full", "agrees", "{:.0%}".format, "-", right=True),
        Column("live", lambda row: row.line.mean(lambda answer: answer.live_bytes), human_bytes, "-", right=True),
        Column("of full", lambda row: row.line.live_fraction, "{:.1%}".format, "-", right=True),
        Column("prefill tokens/s", lambda row: row.line.read_rate, human_rate, right=True),
        Column("decode tokens/s", lambda row: row.line.decode_rate, human_rate, right=True),
    ]
    return Table(columns, rows, title=study.title, note=lambda row: row.line.refused, labels=1)


def published_table(found: Published) -> Table:
    """A paper's own numbers, as printed."""
    columns = [
        Column("model", lambda row: row[0]),
        Column("", lambda row: row[1]),
        *(Column(name, lambda row, place=place: row[2][place], right=True) for place, name in enumerate(found.columns)),
    ]
    return Table(columns, found.rows, title=f"The paper's {found.source}: {found.title}", labels=2)


def write(
    out: Path,
    papers: Sequence[Paper],
    measured: Sequence[Measured],
    extras: Mapping[str, Sequence[Extra]],
    options: Options,
    model: str,
    machine: dict[str, Any],
    files: Sequence[str] = (),
) -> Report:
    """Write report.html, report.md with its pictures, and report.json; ``files`` names those that were read."""
    of_ground = {one.ground: one for one in measured}
    images: dict[str, bytes] = {}
    parts: list[Heading | Table | Picture | str] = [_opening(options, model, machine, files)]
    data: list[dict[str, Any]] = []
    for paper in papers:
        arxiv = f" (arXiv:{paper.arxiv})" if paper.arxiv else ""
        parts.append(Heading(f"{paper.title}{arxiv}"))
        studies: list[dict[str, Any]] = []
        for study in paper.studies:
            found, told = _study(study, paper, of_ground[study.ground], model, options, images)
            parts += found
            studies.append(told)
        for extra in extras.get(paper.name, ()):
            parts += extra.parts
            images |= extra.images
        parts += [f"No counterpart here: {text}" for text in paper.missing]
        parts += [published_table(table) for table in paper.published]
        data.append(
            {
                "paper": paper.name,
                "title": paper.title,
                "studies": studies,
                "more": [extra.data for extra in extras.get(paper.name, ())],
                "no counterpart": list(paper.missing),
                "published": [dataclasses.asdict(table) for table in paper.published],
            }
        )
    report = Report(
        parts, {"settings": dataclasses.asdict(options), "machine": machine, "files": list(files), "papers": data}
    )
    write_files(out, report, f"{TITLE} ({model})", images)
    return report


def _opening(options: Options, model: str, machine: dict[str, Any], files: Sequence[str]) -> str:
    read = f" Text: {', '.join(files)}." if files else ""
    few = ", few questions of each (--quick)" if options.quick else ""
    return (
        f"What the papers' tables and figures show, measured with {model} at lengths that it and this machine can do"
        f"{few}. Scores are percent ± bootstrap standard errors; against full: the mean difference of the same "
        "questions, with its significance p; live: bytes of slots in use when an answer is complete; first token as "
        "full: answers whose first token is the full cache's. The papers' own numbers stand beside ours where the "
        "model is the same, and as printed in tables of their own: of other models their order may be compared, their "
        f"size may not. Seed {options.seed}.{read} {measured_on(machine)}."
    )


def _study(
    study: Study, paper: Paper, measured: Measured, model: str, options: Options, images: dict[str, bytes]
) -> tuple[list[Table | Picture | str], dict[str, Any]]:
    """A study's parts and numbers; its picture goes to ``images``."""
    told: dict[str, Any] = {"study": study.name, "title": study.title, "differs": study.differs}
    if not study.chosen(options.quick):
        why = "Left out by --quick."
    elif measured.journal is None:
        why = measured.absent
    else:
        why = "" if measured.journal.answers else "Nothing is answered yet."
    if why:
        return [f"{study.title}: not measured. {why}"], told | {"not measured": why}
    rows = rows_of(study, measured, model, paper, options.quick)
    ground, asked = study.ground, measured.journal.settings if measured.journal else None
    assert asked is not None, "the ground was asked"
    when = "in view of the compression" if ground.mode == IN_VIEW else "after the compression"
    length = "" if asked.length is None else f" of at most {asked.length:,} tokens"
    what = (
        f"{ground.suite}: {', '.join(asked.tasks)}; {counted(len(measured.items), 'question')}{length}, asked {when}."
    )
    text = f"{what} {study.differs}"
    parts: list[Table | Picture | str] = [study_table(study, rows), text]
    if sum(bool(row.line.scored) for row in rows) > 1:
        name = f"{paper.name}-{study.name}.png"
        named = [dataclasses.replace(row.line, policy=row.label, retained=None) for row in rows[1:]]
        images[name] = png(scores_figure([rows[0].line, *named]))
        parts.append(Picture(study.title, name))
    seed = options.seed
    told["rows"] = [
        {"label": row.label, "paper": row.paper, "first token as full": row.agrees, **as_data(row.line, seed)}
        for row in rows
    ]
    return parts, told | {"ground": dataclasses.asdict(ground)}
