"""The suites ``scbench`` and ``scbench-requests``: several questions about one context (arXiv:2412.10319).

In a dialogue each question follows the earlier ones and their reference answers; as requests every question is asked of
the same compressed context. Either way the context is read and compressed once.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.eval.suites.data import DataFolder, read_rows
from kvjax.eval.suites.haystack_size import largest, too_short
from kvjax.eval.suites.item import Asked, Item, Suite
from kvjax.eval.suites.prompts import cut_middle, tokens_of
from kvjax.eval.suites.scbench_draws import DRAWS, LEAST
from kvjax.eval.suites.scbench_prompts import (
    KINDS,
    MIXED,
    TASKS,
    Kind,
    later_choice,
    question_text,
    references,
    spoken,
)

#: Questions about a context, at most.
TURNS = 5


@dataclasses.dataclass(frozen=True)
class Turn:
    """A question; ``task`` of the mixed tasks names its kind, and ``options`` are those of a choice."""

    input: str
    answer: str | int | float | list[str]
    options: tuple[str, ...] | None = None
    task: str | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """A context with its questions; ``repo`` is the repository that its code is of."""

    multi_turns: tuple[Turn, ...]
    context: str | list[int] | None = None
    input: str | None = None
    repo: str | None = None


@dataclasses.dataclass(frozen=True)
class _Question:
    """A question as it is asked. ``part`` names the kind in a mixed task."""

    text: str
    kind: Kind
    answers: tuple[str, ...]
    said: str
    part: str
    others: tuple[str, ...] = ()


def _places(task: str) -> tuple[str, ...]:
    return f"scbench/scbench_{task}.jsonl", f"scbench/data/scbench_{task}.jsonl"


def _read(data: DataFolder, task: str) -> list[Row] | None:
    """The rows of a task's file; None where there is none and its contexts are drawn."""
    path = data.find(*_places(task))
    if path is None and task in DRAWS:
        return None
    if path is None:
        path = data.download("microsoft/SCBench", f"data/scbench_{task}.jsonl", f"SCBench's {task}", _places(task)[:1])
    rows = read_rows(path, Row)
    for number, row in enumerate(rows, 1):
        if not row.multi_turns or (row.context is None and row.input is None):
            raise UsageError(f"{path}, row {number} has no context or no questions.")
        for turn in row.multi_turns:
            if not turn.input.strip():
                raise UsageError(f"{path}, row {number}: a question has no words.")
            wanted = references(task, turn.answer, turn.options)
            if not wanted or not all(each.strip() for each in wanted):
                raise UsageError(f"{path}, row {number}: a question's answer is empty, so any answer would be right.")
            if task in MIXED and turn.task not in MIXED[task]:
                raise UsageError(f"{path}, row {number}: a question's task is one of {', '.join(MIXED[task])}.")
            if task == "choice_eng" and (len(turn.options or ()) != 4 or turn.answer not in (turn.options or ())):
                raise UsageError(f"{path}, row {number}: a question has four options, and its answer is one of them.")
    return rows


def _check(data: DataFolder, asked: Asked) -> None:
    for task in asked.tasks:
        try:
            _read(data, task)
        except UsageError as error:
            if data.find(*_places(task)) is not None:
                raise
            raise UsageError(f"{str(error)[:-1]}, or ask --tasks {','.join(DRAWS)}, which need no text.") from error


def _questions(task: str, row: Row, functions: tuple[str, ...]) -> list[_Question]:
    found = []
    for turn in row.multi_turns[:TURNS]:
        kind = MIXED[task][turn.task or ""] if task in MIXED else KINDS[task]
        part = f"{task}: {(turn.task or '').removeprefix('scbench_')}" if task in MIXED else task
        answers = references(task, turn.answer, turn.options)
        text = question_text(kind, turn.input, turn.options)
        others = functions if kind.metric == "function found" else ()
        found.append(_Question(text, kind, answers, spoken(turn.answer), part, others))
    return found


def _own(task: str, rows: list[Row], lm: LanguageModel, asked: Asked, requests: bool) -> list[list[Item]]:
    """Dialogues of the benchmark's own rows; contexts that exceed the length lose their middle."""
    found = []
    functions: dict[str | None, tuple[str, ...]] = {}
    for row in rows:
        mine = tuple(str(turn.answer) for turn in row.multi_turns if turn.task in (None, "scbench_repoqa"))
        functions[row.repo] = functions.get(row.repo, ()) + mine
    for number, row in enumerate(rows):
        questions = _questions(task, row, functions[row.repo])
        context = str(row.context if row.context is not None else row.input)
        # The benchmark's own prompts hold the first question's target before the numbers, as requests the question.
        lead = ""
        if task == "mf":
            first, words = row.multi_turns[0].input, questions[0].text
            lead = f"{first if requests else words.removesuffix(first).strip()}\n\n"
            questions[0] = questions[0] if requests else dataclasses.replace(questions[0], text=first)
        if task == "choice_eng" and not requests and not lm.tokenizer.has_chat_template:
            questions[1:] = [dataclasses.replace(one, text=later_choice(one.text)) for one in questions[1:]]
        before = (KINDS[task].before if task in KINDS else "") + lead
        found.append(_fitted(f"{task}/{number}", before + context, questions, lm, asked, requests))
    return found


def _drawn(task: str, lm: LanguageModel, asked: Asked, requests: bool) -> list[list[Item]]:
    """Dialogues over contexts that are drawn to fill the length."""
    draw, per_question = DRAWS[task]
    kind, turns = KINDS[task], 2 if asked.quick else TURNS
    length = min(asked.length or lm.config.max_position, lm.config.max_position)

    def made(number: int, size: int) -> list[Item]:
        context, asked_of = draw(random.Random(f"{asked.seed} {task} {number}"), size, turns)
        questions = [
            _Question(question_text(kind, words, None), kind, references(task, answer, None), spoken(answer), task)
            for words, answer in asked_of
        ]
        return _items_of(f"{task}/{number}", kind.before + context, questions, lm, requests)

    found = []
    for number in range(asked.limit or 1):
        tokens = functools.partial(lambda number, size: _tokens(lm, made(number, size)), number)
        start = max(LEAST, per_question * turns)
        if (least := tokens(start)) > length:
            raise too_short(length, task, least)
        per_unit = tokens(start + 40) - tokens(start)
        most = start + max(40 * length // max(per_unit, 1), 1)
        size = largest(tokens, length, start, most)
        while tokens(size) > length and size > start:  # the search is by halving, and costs are nearly monotonous
            size -= 1
        found.append(made(number, size))
    return found


def _tokens(lm: LanguageModel, items: list[Item]) -> int:
    """Tokens of the longest prompt with its answer."""
    return max(tokens_of(lm, item) for item in items)


def _items_of(name: str, context: str, questions: list[_Question], lm: LanguageModel, requests: bool) -> list[Item]:
    template = lm.tokenizer.has_chat_template
    earlier = tuple((question.text, question.said) for question in questions)
    return [
        Item(
            id=f"{name}/{turn}",
            task=question.part,
            # As requests the question follows the context's last word in the benchmark's own code.
            context=context if requests else context + "\n\n",
            question=question.text,
            answers=question.answers,
            metric=question.kind.metric,
            max_new_tokens=question.kind.max_new_tokens,
            answer_prefix="This paper" if template and turn and not requests and name.startswith("summary/") else "",
            classes=question.others,
            groups=(f"turn {turn + 1}",),
            earlier=() if requests else earlier[:turn],
            shares=name,
        )
        for turn, question in enumerate(questions)
    ]


def _fitted(
    name: str, context: str, questions: list[_Question], lm: LanguageModel, asked: Asked, requests: bool
) -> list[Item]:
    """The items of a context, of which the middle is taken out until the longest prompt fits."""
    most = min(asked.length or lm.config.max_position, lm.config.max_position)
    items = _items_of(name, context, questions, lm, requests)
    size = len(lm.tokenizer.encode(context))
    while (over := _tokens(lm, items) - most) > 0:
        size -= over
        if size < 16:
            raise UsageError(f"{most} tokens are too few for the questions of {name} and their answers.")
        cut, _ = cut_middle(lm, context, "", size)
        items = _items_of(name, cut, questions, lm, requests)
    return items


def _items(lm: LanguageModel, data: DataFolder, asked: Asked, *, requests: bool) -> list[Item]:
    found: list[Item] = []
    for task in asked.tasks:
        rows = _read(data, task)
        if rows is None:
            dialogues = _drawn(task, lm, asked, requests)
        else:
            dialogues = _own(task, rows[: asked.limit], lm, asked, requests)
        found += [item for dialogue in dialogues for item in dialogue]
    return found


_ABOUT = (
    "Score: the mean of the tasks, each with the metric of SCBench's own code; mixed tasks count as two. {way} "
    f"{', '.join(DRAWS)} are drawn to fill the length where their file is not given; a given context that exceeds it "
    "loses its middle, as in the benchmark, and with it answers. Of an answer to repoqa all of the first block of code "
    "is compared, where the benchmark takes the first function in it. The label of many_shot is looked for, where the "
    "benchmark's code looks for any of its characters."
)


def _suite(name: str, title: str, way: str, items: Callable[..., Any]) -> Suite:
    about = _ABOUT.format(way=way)
    return Suite(name, title, TASKS, about, items, _check, length=4096, limit=5)


SCBENCH = _suite(
    "scbench",
    "SCBench, dialogues: several turns about one context",
    "Each turn follows the earlier questions and their reference answers (the benchmark's golden context).",
    functools.partial(_items, requests=False),
)
SCBENCH_REQUESTS = _suite(
    "scbench-requests",
    "SCBench, requests: several questions about one context, each on its own",
    "Every question is asked of the same context, without the earlier ones.",
    functools.partial(_items, requests=True),
)
