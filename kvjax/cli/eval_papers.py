"""``kvjax eval --suite papers``: the papers' tables and figures on a model of yours."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.checks import MOST_SEED, whole_number
from kvjax.cli import first_steps
from kvjax.cli.app import INTERRUPTED
from kvjax.tables import counted

if TYPE_CHECKING:
    from kvjax.checkpoints.load import LanguageModel
    from kvjax.eval.papers.measured import Measured, Options
    from kvjax.eval.suites.data import DataFolder
    from kvjax.runtime.distributed import Group

_say = functools.partial(first_steps.say, "eval")


def papers(
    out: Path, names: tuple[str, ...], options: Options, data: DataFolder, compile_cache: bool, everyone: Group
) -> int:
    """Measure what no earlier run in the folder has, then write the report of all of it.

    Of several processes each answers questions, and process 0 alone does what is no question.
    """
    from kvjax.bench import machine
    from kvjax.eval.papers import extras, papers_report
    from kvjax.eval.papers.measured import measured
    from kvjax.eval.papers.registry import find_papers
    from kvjax.eval.suites import folder, hosts

    chosen = find_papers(names)
    for name, value in (("--length", options.length), ("--limit", options.limit)):
        if value is not None:
            whole_number(name, value, 1)
    whole_number("--seed", options.seed, 0, MOST_SEED)
    first_steps.check_length(options.model, options.length)
    found = measured(chosen, out, options, data)
    command = {"suite": "papers", "tasks": names, **dataclasses.asdict(options)}
    hosts.agree(everyone, "command", command | {"data": {one.ground.name: one.absent for one in found}})
    lm = first_steps.load(options.model, options.dtype, compile_cache=compile_cache, weights=options.weights)
    more: dict[str, list[extras.Extra]] = {}
    facts, code = machine.describe(), 0
    kinds = {paper.name for paper in chosen} if everyone.process == 0 else set[str]()
    try:
        with everyone.together():
            for one in found:
                one.prepare(lm, data, _say if everyone.process == 0 else lambda _: None)
            if everyone.process == 0:
                _announce(found, lm)
            if "razor" in kinds:
                more["razor"] = [extras.retrieval_heads(lm)]
            if "round" in kinds:
                more["round"] = [extras.watershed(lm)]
            for one in found:
                one.run()
            if "ahakv" in kinds:
                more["ahakv"] = [extras.positions(lm, out, options.quick, _say)]
            if "round" in kinds:
                more["round"].append(extras.rounds(lm, data, out, options.quick, facts, _say))
    except KeyboardInterrupt:
        there = any(one.journal.answers for one in found if one.journal is not None)
        kept = f"what is answered is in {out}" if there else "nothing was answered yet"
        _say(f"{kept}; the same command goes on from there")
        code = INTERRUPTED
    finally:
        for one in found:
            one.close()
    if everyone.process > 0:
        if code != INTERRUPTED:
            answered = counted(sum(one.answered for one in found), "question")
            _say(f"process {everyone.process} answered {answered}; process 0 writes the report of all")
        return code
    papers_report.write(out, chosen, found, more, options, lm.name, facts, data.found).print(width=160)
    print(f"Saved: {out / folder.PAGE}, {folder.MARKDOWN}, {folder.NUMBERS}.")
    return code


def _announce(found: Sequence[Measured], lm: LanguageModel) -> None:
    """Say how much is to be asked, and about how long it takes."""
    from kvjax.eval.suites import estimate

    answers = sum(one.missing for one in found)
    if answers:
        caches = sum(len(one.caches) for one in found if one.missing)
        spent = estimate.in_words(sum(one.seconds(lm) for one in found))
        _say(
            f"{counted(answers, 'answer')} of {counted(caches, 'cache')}: about {spent} if answers are as long as "
            "they may be, and the programs of each cache are compiled besides"
        )
