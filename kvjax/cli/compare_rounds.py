"""``kvjax compare-rounds``: Round Attention's strategies on dialogues of yours; one table, printed and saved."""

from __future__ import annotations

import sys
from pathlib import Path

from kvjax.cli import render, session
from kvjax.cli.compare import INTERRUPTED, make_folder
from kvjax.errors import UsageError


def run(
    *,
    model: str,
    dtype: str | None,
    dialogues: Path,
    policies: str,
    most: int,
    tokens: int | None,
    max_new_tokens: int,
    out: Path,
    markdown: bool,
    compile_cache: bool,
) -> int:
    """Ask what ``out`` does not hold yet, and show all it holds; a request is checked before anything runs."""
    from kvjax.bench import machine
    from kvjax.checks import whole_number
    from kvjax.eval import rounds
    from kvjax.eval.contenders import split_policies
    from kvjax.eval.dialogues import read_dialogues

    names = list(rounds.DEFAULT) if policies == "all" else split_policies(policies)
    for name in names:
        rounds.round_policy(name)
    whole_number("most", most, 1)
    whole_number("max_new_tokens", max_new_tokens, 1)
    if not dialogues.is_file():
        raise UsageError(f"--dialogues names a file that does not exist: {dialogues}.")
    make_folder(out)
    if compile_cache:
        session.enable_compile_cache()
    lm = session.load(model, dtype)
    # A quarter of the context is left for templates, questions and answers.
    room = lm.config.max_position * 3 // 4 if tokens is None else tokens
    whole_number("tokens", room, 1, lm.config.max_position)
    read = read_dialogues(dialogues, lambda text: len(lm.tokenizer.encode(text)), room)
    long = [dialogue for dialogue in read if len(dialogue.rounds) > 1][:most]
    if not long:
        raise UsageError(f"No dialogue of {dialogues} has two rounds before its question that fit {room} tokens.")
    settings = rounds.Settings(lm.name, str(lm.params.dtype), dialogues.name, room, max_new_tokens)
    described = machine.describe()
    comparison = rounds.RoundComparison(
        lm,
        names,
        settings,
        answers=rounds.read_answers(out / "answers.json", settings),
        save=lambda answers: rounds.save(out, settings, answers, described),
        say=_say,
    )
    code = 0
    try:
        comparison.run(long)
    except KeyboardInterrupt:
        _say(f"what was answered so far is in {out}; the same command goes on from there")
        code = INTERRUPTED
    answers = comparison.answers
    if answers and markdown:
        print(rounds.markdown(settings, answers, described), end="")
    elif answers:
        render.print_table("", rounds.COLUMNS, rounds.table(answers), width=200)
        print(rounds.footnote(settings, answers, described))
    return code


def _say(what: str) -> None:
    print(f"kvjax compare-rounds: {what}", file=sys.stderr, flush=True)
