"""``kvjax compare``: every policy asked the same questions; one table and one picture, printed and saved."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.checks import whole_number
from kvjax.cli import first_steps, inputs
from kvjax.cli import options as flag
from kvjax.cli.app import INTERRUPTED, app
from kvjax.errors import UsageError

if TYPE_CHECKING:
    from kvjax.checkpoints.load import LanguageModel
    from kvjax.eval.entries import Entry
    from kvjax.eval.results import Row, Settings
    from kvjax.tables import Report

_say = functools.partial(first_steps.say, "compare")

RESULTS, TABLE, PICTURE = "results.json", "results.md", "accuracy.png"


@app.command()
def compare(
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the results; rows already there are not measured again.")
    ],
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            help="Such as 'snapkv;lagkv:lag=64,sink=4;h2o'; `all` names every policy, and `kvjax policies` lists them.",
        ),
    ] = "all",
    retained: flag.Retained = "0.75,0.5,0.25,0.125",
    tasks: Annotated[
        str, typer.Option("--tasks", help="Comma-separated needle tasks; a wrong name lists them.")
    ] = "niah_single_1,noise_multikey,noise_multivalue",
    lengths: Annotated[
        str, typer.Option("--lengths", help="Comma-separated prompt lengths in tokens, with question and answer.")
    ] = "700",
    samples: Annotated[int, typer.Option("--samples", help="Samples of each task, in one batch.")] = 12,
    turns: Annotated[
        bool, typer.Option("--turns/--no-turns", help="Whether to ask three-turn conversations too.")
    ] = True,
    storage: flag.Storage = "model",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the samples.")] = 42,
    markdown: flag.Markdown = False,
    compile_cache: flag.CompileCache = True,
) -> int:
    """Ask every policy's cache the same questions.

    Accuracy, agreement with the full cache, bytes and speed go to one table and one picture. Results are saved after
    every row; the same command resumes after Ctrl-C, and with more policies or fractions adds what is missing.
    """
    from kvjax.eval.entries import entries
    from kvjax.eval.results import Settings

    chosen = entries(policies, inputs.numbers(retained, "--retained"))
    tokens = inputs.integers(lengths, "--lengths")
    if not tokens:
        raise UsageError("--lengths is empty; give numbers of tokens such as 700.")
    for length in tokens:
        whole_number("--lengths", length, 1)
    named = inputs.names(tasks, "--tasks")
    with inputs.naming_flags("samples", "seed"):
        settings = Settings(model, "", named, samples, turns, storage, seed)
    first_steps.check_results(out)
    lm = first_steps.load(model, dtype, compile_cache=compile_cache, weights=weights)
    return _run(lm, settings, chosen, sorted(set(tokens)), out, markdown)


def _run(
    lm: LanguageModel,
    settings: Settings,
    chosen: Sequence[Entry],
    lengths: Sequence[int],
    out: Path,
    markdown: bool,
) -> int:
    """Measure the rows that the folder does not hold yet, and show all of them."""
    from kvjax.bench import machine
    from kvjax.checkpoints.digest import weights_digest
    from kvjax.eval.compare import Comparison
    from kvjax.eval.results import read_rows

    settings = dataclasses.replace(
        settings, model=lm.name, dtype=lm.params.number_format, parameters=weights_digest(lm.params)
    )
    files = _Files(out, settings, machine.describe())
    comparison = Comparison(lm, settings, rows=read_rows(out / RESULTS, settings), save=files.save, say=_say)
    if comparison.rows:
        _say(f"rows kept of an earlier run: {len(comparison.rows)}")
    code = 0
    try:
        comparison.run(chosen, lengths)
    except KeyboardInterrupt:
        kept = f"what was measured so far is in {out}" if comparison.rows else "nothing was measured yet"
        _say(f"{kept}; the same command goes on from there")
        code = INTERRUPTED
    if comparison.rows:
        files.draw(comparison.rows)
        files.show(comparison.rows, markdown)
    return code


class _Files:
    """The files that a comparison leaves in its folder."""

    def __init__(self, out: Path, settings: Settings, machine: dict[str, Any]):
        self._out, self._settings, self._machine = out, settings, machine

    def save(self, rows: Sequence[Row]) -> None:
        """Numbers and Markdown, after every row."""
        from kvjax import files

        found = self._report(rows)
        self._out.mkdir(parents=True, exist_ok=True)
        files.write_atomically(self._out / RESULTS, found.json())
        files.write_atomically(self._out / TABLE, found.markdown())

    def draw(self, rows: Sequence[Row]) -> None:
        """The picture, and the Markdown that shows it."""
        from kvjax import files
        from kvjax.eval import pictures
        from kvjax.figures import png

        files.write_atomically(self._out / PICTURE, png(pictures.accuracy_figure(rows)))
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
