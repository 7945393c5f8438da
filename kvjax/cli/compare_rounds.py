"""``kvjax compare-rounds``: Round Attention's strategies on dialogues of yours; one table, printed and saved."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvjax.cli import first_steps, inputs
from kvjax.cli import options as flag
from kvjax.cli.app import INTERRUPTED, app
from kvjax.errors import UsageError
from kvjax.files import check_file, check_folder, check_picture, file_digest

if TYPE_CHECKING:
    from kvjax.checkpoints.load import LanguageModel
    from kvjax.eval.dialogues import Dialogue
    from kvjax.eval.round_questions import Settings

_say = functools.partial(first_steps.say, "compare-rounds")


@app.command()
def compare_rounds(
    dialogues: Annotated[
        Path,
        typer.Option("--dialogues", help="JSON (lines): messages, ShareGPT, LongChat topics or LongMemEval."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the results; answers already there are kept.")],
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    policies: Annotated[
        str, typer.Option("--policies", help="Such as round,round:top=0.3; `all` names every strategy.")
    ] = "all",
    most: Annotated[int, typer.Option("--most", help="Dialogues to read, from the file's beginning.")] = 10,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", help="Cut histories to this many tokens; by default three quarters of the context."),
    ] = None,
    max_new_tokens: Annotated[int, flag.option("max_new_tokens")] = 16,
    rounds: Annotated[
        str | None,
        typer.Option("--rounds", help="Comma-separated numbers of rounds to which each dialogue is cut, in turn."),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed runs of each answer, after a warm-up.")] = 3,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Also draw time and tokens by number of rounds, as a PNG.")
    ] = None,
    markdown: flag.Markdown = False,
    compile_cache: flag.CompileCache = True,
) -> int:
    """Ask dialogues' questions under Round Attention.

    Which rounds each strategy selects, agreement with the full cache, device bytes and time a turn go to one table.
    Answers are saved after every dialogue; the same command resumes after Ctrl-C.
    """
    from kvjax.checkpoints.digest import weights_digest
    from kvjax.checks import whole_number
    from kvjax.eval.dialogues import history_capacity
    from kvjax.eval.entries import split_policies
    from kvjax.eval.round_questions import DEFAULT, Settings, round_policy
    from kvjax.figures import require_matplotlib

    names = list(DEFAULT) if policies == "all" else split_policies(policies)
    for name in names:
        round_policy(name)
    for name, value in (("--most", most), ("--max-new-tokens", max_new_tokens), ("--repeats", repeats)):
        whole_number(name, value, 1)
    counts = inputs.integers(rounds, "--rounds") or ()
    for count in counts:
        whole_number("--rounds", count, 2)
    if picture is not None:
        require_matplotlib()
        check_picture("--picture", picture)
    check_file("--dialogues", dialogues)
    check_folder("--out", out)
    lm = first_steps.load(model, dtype, compile_cache=compile_cache, weights=weights)
    asked = _dialogues(lm, dialogues, most, tokens, counts)
    room = history_capacity(lm, tokens)
    settings = Settings(
        lm.name, lm.params.number_format, dialogues.name, room, max_new_tokens, repeats, file_digest(dialogues),
        weights_digest(lm.params),
    )  # fmt: skip
    return _compare(lm, names, asked, settings, out, picture, markdown)


def _dialogues(
    lm: LanguageModel, path: Path, most: int, tokens: int | None, counts: Sequence[int]
) -> Sequence[Dialogue]:
    """The dialogues of a file; where ``counts`` are given, each cut to so many rounds."""
    from kvjax.eval.dialogues import long_dialogues

    whole = long_dialogues(lm, path, most=most, least_rounds=2, tokens=tokens)
    if not counts:
        return whole
    cut = [
        dataclasses.replace(dialogue.shortened(count), name=f"{dialogue.name}:{count}")
        for dialogue in whole
        for count in counts
        if count <= len(dialogue.rounds)
    ]
    cut = [dialogue for dialogue in cut if dialogue.questions]
    if not cut:
        raise UsageError(f"No dialogue of {path} has {min(counts)} rounds before its question that fit.")
    return cut


def _compare(
    lm: LanguageModel,
    names: Sequence[str],
    dialogues: Sequence[Dialogue],
    settings: Settings,
    out: Path,
    picture: Path | None,
    markdown: bool,
) -> int:
    """Ask what no earlier run has answered; report all answers, those of earlier runs too."""
    from kvjax.bench import machine
    from kvjax.eval import round_report as report
    from kvjax.eval.round_questions import RoundComparison, read_answers
    from kvjax.figures import png
    from kvjax.files import write_atomically

    described = machine.describe()
    comparison = RoundComparison(
        lm,
        names,
        settings,
        answers=read_answers(out / "answers.json", settings),
        save=lambda answers: report.save(out, report.report(settings, answers, described)),
        say=_say,
    )
    code = 0
    try:
        comparison.run(dialogues)
    except KeyboardInterrupt:
        kept = f"what was answered so far is in {out}; the same command goes on from there"
        _say(kept if comparison.answers else "nothing was answered yet")
        code = INTERRUPTED
    answers = comparison.answers
    if answers and picture is not None:
        write_atomically(picture, png(report.turns_figure(settings, answers)))
    if answers:
        report.report(settings, answers, described).print(markdown=markdown, width=200)
    return code
