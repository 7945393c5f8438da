"""``kvjax compare``: every policy asked the same questions; one table and one picture, printed and saved."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.cli import session
from kvjax.errors import KvjaxError, UsageError

if TYPE_CHECKING:
    from kvjax.eval.results import Row, Settings
    from kvjax.tables import Report

RESULTS, TABLE, PICTURE = "results.json", "results.md", "accuracy.png"
INTERRUPTED = 130


def run(
    *,
    model: str,
    dtype: str | None,
    policies: str,
    retained: Sequence[float],
    tasks: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    turns: bool,
    storage: str,
    seed: int,
    out: Path,
    markdown: bool,
    compile_cache: bool,
) -> int:
    """Measure what ``out`` does not hold yet, and show all it holds; a request is checked before anything runs."""
    from kvjax.bench import machine
    from kvjax.eval.candidates import candidates
    from kvjax.eval.pictures import new_figure
    from kvjax.eval.results import Settings, read_rows

    chosen = candidates(policies, retained)
    if not lengths:
        raise UsageError("--lengths is empty; give numbers of tokens such as 700.")
    settings = Settings(model, "", tuple(tasks), samples, turns, storage, seed)  # refuses what makes no sense
    new_figure(1, 1)  # refuses without matplotlib now, and not when all is measured
    make_folder(out)
    if compile_cache:
        session.enable_compile_cache()
    lm = session.load(model, dtype)
    from kvjax.eval.compare import Comparison

    settings = dataclasses.replace(settings, model=lm.name, dtype=str(lm.params.dtype))
    files = _Files(out, settings, machine.describe())
    comparison = Comparison(lm, settings, rows=read_rows(out / RESULTS, settings), save=files.save, say=_say)
    if comparison.rows:
        _say(f"{len(comparison.rows)} rows of an earlier run are kept")
    code = 0
    try:
        comparison.run(chosen, sorted(set(lengths)))
    except KeyboardInterrupt:
        _say(f"what was measured so far is in {out}; the same command goes on from there")
        code = INTERRUPTED
    if comparison.rows:
        files.draw(comparison.rows)
        files.show(comparison.rows, markdown)
    return code


class _Files:
    """The files of a comparison in its folder."""

    def __init__(self, out: Path, settings: Settings, machine: dict[str, Any]):
        self._out, self._settings, self._machine = out, settings, machine

    def save(self, rows: Sequence[Row]) -> None:
        """Numbers and Markdown, after every row."""
        from kvjax import files

        found = self._report(rows)
        files.write_atomically(self._out / RESULTS, found.json())
        files.write_atomically(self._out / TABLE, found.markdown())

    def draw(self, rows: Sequence[Row]) -> None:
        """The picture, and the Markdown that shows it."""
        from kvjax import files
        from kvjax.eval import pictures

        files.write_atomically(self._out / PICTURE, pictures.png(pictures.accuracy_figure(rows)))
        self.save(rows)

    def show(self, rows: Sequence[Row], markdown: bool) -> None:
        """The tables on standard output."""
        self._report(rows).print(markdown=markdown, width=200)
        if not markdown:
            print(f"Saved: {', '.join(str(self._out / name) for name in (RESULTS, TABLE, PICTURE))}.")

    def _report(self, rows: Sequence[Row]) -> Report:
        from kvjax.eval.comparison_report import report

        picture = PICTURE if (self._out / PICTURE).exists() else None
        return report(self._settings, rows, self._machine, picture)


def make_folder(out: Path) -> None:
    """The folder for results, or one sentence why it cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out names a folder that cannot be made: {out} ({error.strerror}).") from error
    if not os.access(out, os.W_OK):
        raise KvjaxError(f"--out names a folder that cannot be written to: {out}.")


def _say(what: str) -> None:
    print(f"kvjax compare: {what}", file=sys.stderr, flush=True)
