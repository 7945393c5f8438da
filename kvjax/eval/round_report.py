"""The report of a comparison of Round Attention's strategies: its tables, the footnote, the numbers, a picture."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from kvjax.eval.pictures import plain_axes, style
from kvjax.eval.round_questions import FULL, Answer, Settings
from kvjax.figures import new_figure
from kvjax.files import write_atomically
from kvjax.tables import Column, Report, Table, counted, human_bytes, measured_on

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def summary(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Means by policy, the full cache first, of the questions that every policy answered."""
    shared, turns = answered_by_all(answers), turn_ratios(answers)
    return [_means(name, [answer for answer in shared if answer.policy == name], turns) for name in policies(answers)]


def policies(answers: Sequence[Answer]) -> list[str]:
    """Names of the policies in the order asked, the full cache first."""
    return [FULL, *dict.fromkeys(answer.policy for answer in answers if answer.policy != FULL)]


def answered_by_all(answers: Sequence[Answer]) -> list[Answer]:
    """The answers to questions that every policy answered."""
    names = set(policies(answers))
    by_question: dict[tuple[str, int], set[str]] = {}
    for answer in answers:
        by_question.setdefault(answer.key[:2], set()).add(answer.policy)
    return [answer for answer in answers if by_question[answer.key[:2]] >= names]


def turn_ratios(answers: Sequence[Answer]) -> dict[tuple[str, int, str], float]:
    """Time of a turn as a multiple of the full cache's, of the answers that are as long as the full cache's."""
    lengths = {answer.key[:2]: len(answer.tokens) for answer in answers if answer.policy == FULL}
    return {answer.key: answer.turn for answer in answers if lengths.get(answer.key[:2]) == len(answer.tokens)}


def _means(name: str, answers: Sequence[Answer], turns: Mapping[tuple[str, int, str], float]) -> dict[str, Any]:
    judged = [answer for answer in answers if answer.gold]
    timed = [turns[answer.key] for answer in answers if answer.key in turns]

    def mean(values: Sequence[float]) -> float | None:
        return math.fsum(values) / len(values) if values else None

    return {
        "policy": name,
        "questions": len(answers),
        "rounds": mean([a.rounds for a in answers]),
        "selected": mean([len(a.selected) for a in answers]),
        "gold found": mean([float(bool(set(a.gold) & set(a.selected))) for a in judged]),
        "gold recall": mean([len(set(a.gold) & set(a.selected)) / len(a.gold) for a in judged]),
        "first token": mean([float(a.agrees > 0 or not a.tokens) for a in answers]),
        "tokens agree": mean([a.agrees / max(len(a.tokens), 1) for a in answers]),
        "used": mean([a.used for a in answers]),
        "used share": mean([a.used / a.seen for a in answers]),
        **{
            name: None if None in sizes else {"bytes": mean(sizes), "of full": mean(of_full)}
            for name, sizes, of_full in _sizes(answers)
        },
        "host": mean([a.host_bytes for a in answers]),
        "moved": mean([a.moved_bytes for a in answers]),
        "turn": statistics.median(timed) if timed else None,
    }


def _sizes(answers: Sequence[Answer]) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Each size on the device, in bytes and over a full cache; None where an answer does not say it."""
    for name in ("live", "allocated", "peak"):
        sizes = [getattr(answer, f"{name}_bytes") for answer in answers]
        full = (answer.full_bytes for answer in answers)
        yield name, sizes, [None if one is None else one / of for one, of in zip(sizes, full, strict=True)]


def table(answers: Sequence[Answer]) -> Table:
    """Means by policy."""
    two = "{:.2f}".format
    columns = (
        Column("policy", "policy"),
        Column("rounds selected", lambda row: f"{row['selected']:.1f} of {row['rounds']:.1f}"),
        *(Column(name, name, two, "-") for name in ("gold found", "gold recall", "first token", "tokens agree")),
        Column("tokens used", lambda row: f"{row['used']:.0f} ({row['used share']:.0%})"),
        *(Column(name, name, _size, "-") for name in ("live", "allocated", "peak")),
        Column("host", "host", human_bytes),
        Column("moved", "moved", human_bytes),
        Column("turn", "turn", two, "-"),
    )
    return Table(columns, [row for row in summary(answers) if row["questions"]])


def _size(size: dict[str, float]) -> str:
    return f"{human_bytes(size['bytes'])} ({size['of full']:.1%})"


def by_question_type(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Right answers by policy, the full cache first, and type of question, of the questions that every policy answered.

    Returns:
      For each policy ``{"policy", "types"}``: by type, and under "all", ``{"right", "questions"}``: the fraction of
      answers that contain the expected string, and how many questions have one. Empty where none has.
    """
    judged = [answer for answer in answered_by_all(answers) if answer.right is not None]
    types = sorted({answer.kind for answer in judged})
    found = []
    for name in policies(judged) if judged else ():
        mine = [answer for answer in judged if answer.policy == name]
        groups = {kind: [answer for answer in mine if answer.kind == kind] for kind in types} | {"all": mine}
        found.append({"policy": name, "types": {kind: _right(group) for kind, group in groups.items()}})
    return found


def _right(answers: Sequence[Answer]) -> dict[str, float]:
    return {"right": statistics.fmean(bool(answer.right) for answer in answers), "questions": len(answers)}


def type_table(found: Sequence[dict[str, Any]]) -> Table:
    """The table of :func:`by_question_type`, the paper's table 3 on its side: a policy a row, a type a column."""

    def column(kind: str, questions: int) -> Column:
        name = f"{kind or 'no type'} ({questions})"
        return Column(name, lambda row: row["types"][kind]["right"], "{:.2f}".format)

    types = (column(kind, group["questions"]) for kind, group in found[0]["types"].items())
    return Table([Column("right answers", "policy"), *types], found)


def footnote(settings: Settings, answers: Sequence[Answer], machine: dict[str, Any]) -> str:
    """The sentences that say what the numbers are, and where they come from."""
    answers = answered_by_all(answers)  # as the table's
    questions = {answer.key[:2] for answer in answers}
    turns, others = turn_ratios(answers), [answer for answer in answers if answer.policy != FULL]
    timed = [answer for answer in others if answer.key in turns]
    full = [statistics.median(answer.seconds) for answer in answers if answer.policy == FULL]
    judged = {answer.key[:2] for answer in answers if answer.gold}
    having = counted(len(judged), "question has", "questions have")
    return (
        f"{settings.model}, {settings.dtype}; {counted(len(questions), 'question')} after "
        f"{counted(len({name for name, _ in questions}), 'dialogue')} of {settings.dialogues}, "
        f"cut to {settings.tokens} tokens, {settings.max_new_tokens} tokens "
        "answered; means. Rounds selected: of the earlier ones. Gold found: questions that brought at least one round "
        f"that holds the answer; gold recall: fraction of such rounds that came ({having} them). "
        "First token, tokens agree: as the full cache's, and the fraction of the answer before the first difference. "
        "Tokens used: what the layers above the watershed attended to. Live, allocated, peak: bytes on the device, and "
        "over the live bytes of a full cache: of slots that hold a token while the answer is decoded, of all that is "
        "allocated for them then, and of everything held for the conversation at once at the worst moment of the turn, "
        "while the question is read or the turn is closed, with the conversation that it continues, which is kept here "
        "for the next question. Host: in host memory; moved: from there for the question. "
        "Turn: time from the question to its last token, divided by the full cache's "
        f"(median {statistics.median(full):.2f} s), timed in turn, {settings.repeats} each; median over answers "
        f"as long as the full cache's ({len(timed)} of {len(others)}). "
        f"{measured_on(machine)}."
    )


def report(settings: Settings, answers: Sequence[Answer], machine: dict[str, Any]) -> Report:
    """The tables, what they say, and every answer as JSON."""
    right = by_question_type(answers)
    parts: list[Table | str] = [table(answers), footnote(settings, answers, machine)]
    if right:
        parts += ["By type of question (and how many there are), fraction of answers that contain the expected words:"]
        parts.append(type_table(right))
    data = {
        "settings": dataclasses.asdict(settings),
        "machine": machine,
        "by question type": right,
        "answers": [dataclasses.asdict(answer) for answer in answers],
    }
    return Report(parts, data)


def save(out: Path, found: Report) -> None:
    """Numbers and tables in the folder ``out``, each whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "answers.json", found.json())
    write_atomically(out / "rounds.md", found.markdown())


#: The paper's classes of conversations and the most rounds of each (section 4.2); what is longer counts as the last.
CLASSES = {"mini": 10, "small": 30, "medium": 50, "large": 100}


def class_of(rounds: int) -> str:
    """The paper's class of a conversation with so many earlier rounds."""
    return next((name for name, most in CLASSES.items() if rounds <= most), "large")


def turns_figure(settings: Settings, answers: Sequence[Answer]) -> Figure:
    """Time of a turn and tokens attended to above the watershed, by class of rounds: the paper's figure 3.

    Time is a multiple of the full cache's, median and quartiles over questions; tokens are means.
    """
    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    turns = turn_ratios(answers)
    rounds = {name: [a.rounds for a in answers if class_of(a.rounds) == name] for name in CLASSES}
    rounds = {name: found for name, found in rounds.items() if found}
    for number, policy in enumerate(policies(answers)):
        mine = {name: [a for a in answers if a.policy == policy and class_of(a.rounds) == name] for name in rounds}
        mine = {name: found for name, found in mine.items() if found}
        line = {"linewidth": 1.3, "markersize": 4.5, "label": policy, **style(number)}
        places = [statistics.fmean(rounds[name]) for name in mine]
        right.plot(places, [statistics.fmean(a.used for a in found) for found in mine.values()], **line)
        if policy == FULL:
            left.axhline(1.0, color=line["color"], linestyle="--", linewidth=1, label=policy)
            continue
        timed = {name: [turns[a.key] for a in found if a.key in turns] for name, found in mine.items()}
        low, middle, high = np.array([_quartiles(found) for found in timed.values() if found]).reshape(-1, 3).T
        places = [statistics.fmean(rounds[name]) for name, found in timed.items() if found]
        left.errorbar(places, middle, yerr=[middle - low, high - middle], elinewidth=0.6, capsize=1.5, **line)
    ticks = [statistics.fmean(found) for found in rounds.values()]
    for axes, ylabel in ((left, "turn, times the full cache's"), (right, "tokens that upper layers attend to")):
        plain_axes(axes, "earlier rounds", ylabel)
        axes.set_xticks(ticks, [f"{name}\n{tick:.0f}" for name, tick in zip(rounds, ticks, strict=True)])
        axes.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8)
    figure.suptitle(f"Round Attention: a turn by rounds of its conversation ({settings.model})", fontsize=11)
    return figure


def _quartiles(values: Sequence[float]) -> Float[np.ndarray, " 3"]:
    return np.quantile(values, (0.25, 0.5, 0.75))
