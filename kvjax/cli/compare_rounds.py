"""``kvjax compare-rounds``: Round Attention's strategies on dialogues of yours; one table, printed and saved."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from kvjax.cli import session
from kvjax.cli.compare import INTERRUPTED, make_folder
from kvjax.errors import UsageError
from kvjax.files import check_writable


def run(
    *,
    model: str,
    dtype: str | None,
    dialogues: Path,
    policies: str,
    most: int,
    tokens: int | None,
    max_new_tokens: int,
    rounds: Sequence[int],
    repeats: int,
    out: Path,
    picture: Path | None,
    markdown: bool,
    compile_cache: bool,
) -> int:
    """Ask what ``out`` does not hold yet, and show all it holds; a request is checked before anything runs."""
    from kvjax.bench import machine
    from kvjax.checks import whole_number
    from kvjax.eval import round_report as report
    from kvjax.eval.candidates import split_policies
    from kvjax.eval.dialogues import history_room, long_dialogues
    from kvjax.eval.pictures import new_figure, png
    from kvjax.eval.round_questions import DEFAULT, RoundComparison, Settings, read_answers, round_policy
    from kvjax.files import write_atomically

    names = list(DEFAULT) if policies == "all" else split_policies(policies)
    for name in names:
        round_policy(name)
    for name, value in (("most", most), ("max_new_tokens", max_new_tokens), ("repeats", repeats)):
        whole_number(name, value, 1)
    for count in rounds:
        whole_number("rounds", count, 2)
    if picture is not None:
        new_figure(1, 1)  # refuses without matplotlib now, and not when all is measured
        check_writable("--picture", picture)
    if not dialogues.is_file():
        raise UsageError(f"--dialogues names a file that does not exist: {dialogues}.")
    make_folder(out)
    if compile_cache:
        session.enable_compile_cache()
    lm = session.load(model, dtype)
    long = long_dialogues(lm, dialogues, most=most, least_rounds=2, tokens=tokens)
    if rounds:
        cut = [
            dataclasses.replace(dialogue.shortened(count), name=f"{dialogue.name}:{count}")
            for dialogue in long
            for count in rounds
            if count <= len(dialogue.rounds)
        ]
        long = [dialogue for dialogue in cut if dialogue.questions]
        if not long:
            raise UsageError(f"No dialogue of {dialogues} has {min(rounds)} rounds before its question that fit.")
    room = history_room(lm, tokens)
    settings = Settings(lm.name, str(lm.params.dtype), dialogues.name, room, max_new_tokens, repeats)
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
        comparison.run(long)
    except KeyboardInterrupt:
        _say(f"what was answered so far is in {out}; the same command goes on from there")
        code = INTERRUPTED
    answers = comparison.answers
    if answers and picture is not None:
        write_atomically(picture, png(report.turns_figure(settings, answers)))
    if answers:
        report.report(settings, answers, described).print(markdown=markdown, width=200)
    return code


def _say(what: str) -> None:
    print(f"kvjax compare-rounds: {what}", file=sys.stderr, flush=True)
