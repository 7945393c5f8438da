"""A comparison of Round Attention's strategies as one table and one picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from kvjax.eval.pictures import new_figure, plain_axes, style
from kvjax.eval.round_questions import FULL, Answer, Settings, to_json
from kvjax.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "policy",
    "rounds selected",
    "gold found",
    "gold recall",
    "first token",
    "tokens agree",
    "tokens used",
    "device",
    "of full",
    "host",
    "moved",
    "turn",
)


def summary(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Means by policy, the full cache first, of the questions that every policy answered."""
    names = [FULL, *dict.fromkeys(answer.policy for answer in answers if answer.policy != FULL)]
    by_question: dict[tuple[str, int], set[str]] = {}
    for answer in answers:
        by_question.setdefault(answer.key[:2], set()).add(answer.policy)
    turns = turn_ratios(answers)
    return [
        _means(name, [a for a in answers if a.policy == name and by_question[a.key[:2]] >= set(names)], turns)
        for name in names
    ]


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
        "device": mean([a.device_bytes for a in answers]),
        "of full": mean([a.device_bytes / a.full_bytes for a in answers]),
        "host": mean([a.host_bytes for a in answers]),
        "moved": mean([a.moved_bytes for a in answers]),
        "turn": statistics.median(timed) if timed else None,
    }


def table(answers: Sequence[Answer]) -> list[list[str]]:
    """Cells under ``COLUMNS``."""
    from kvjax.tables import human_bytes

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return [
        [
            found["policy"],
            f"{found['selected']:.1f} of {found['rounds']:.1f}",
            share(found["gold found"]),
            share(found["gold recall"]),
            share(found["first token"]),
            share(found["tokens agree"]),
            f"{found['used']:.0f} ({found['used share']:.0%})",
            human_bytes(found["device"]),
            f"{found['of full']:.1%}",
            human_bytes(found["host"]),
            human_bytes(found["moved"]),
            share(found["turn"]),
        ]
        for found in summary(answers)
        if found["questions"]
    ]


def footnote(settings: Settings, answers: Sequence[Answer], machine: dict[str, Any]) -> str:
    """What the numbers are, and where they come from."""
    questions = {answer.key[:2] for answer in answers}
    turns, others = turn_ratios(answers), [answer for answer in answers if answer.policy != FULL]
    timed = [answer for answer in others if answer.key in turns]
    full = [statistics.median(answer.seconds) for answer in answers if answer.policy == FULL]
    judged = {answer.key[:2] for answer in answers if answer.gold}
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return (
        f"{settings.model}, {settings.dtype}; {len(questions)} questions after {len({name for name, _ in questions})} "
        f"dialogues of {settings.dialogues}, cut to {settings.tokens} tokens, {settings.max_new_tokens} tokens "
        "answered; means. Rounds selected: of the earlier ones. Gold found: questions that brought at least one round "
        f"that holds the answer; gold recall: share of such rounds that came ({len(judged)} questions have them). "
        "First token, tokens agree: as the full cache's, and the share of the answer before the first difference. "
        "Tokens used: what the layers above the watershed attended to. Device: live bytes while answering; moved: from "
        "host memory for the question. Turn: time from the question to its last token, divided by the full cache's "
        f"(median {statistics.median(full):.2f} s), timed in turn, {settings.repeats} each; median over answers "
        f"as long as the full cache's ({len(timed)} of {len(others)}). "
        f"{machine['processor']}, {machine['cores']} cores; {versions}; {machine['date'][:10]}."
    )


def markdown(settings: Settings, answers: Sequence[Answer], machine: dict[str, Any]) -> str:
    """The table and what it says, as Markdown."""
    from kvjax.eval.comparison_report import markdown_table

    return f"{markdown_table(COLUMNS, table(answers))}\n\n{footnote(settings, answers, machine)}\n"


def save(out: Path, settings: Settings, answers: Sequence[Answer], machine: dict[str, Any]) -> None:
    """Numbers and table in the folder ``out``, each whole or not at all."""
    write_atomically(out / "answers.json", to_json(settings, answers, machine))
    write_atomically(out / "rounds.md", markdown(settings, answers, machine))


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
    for number, policy in enumerate([FULL, *dict.fromkeys(a.policy for a in answers if a.policy != FULL)]):
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
