"""The suite ``longbench-v2``: 503 questions with four options (Bai et al. 2024, arXiv:2412.15204)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.eval.suites.data import DataFolder, read_json, read_rows, row_of
from kvjax.eval.suites.item import Asked, Item, Suite
from kvjax.eval.suites.prompts import cut_middle, room_of

MAX_NEW_TOKENS = 128
PLACES = ("longbench_v2/data.json", "longbench_v2/data.jsonl")
CONTEXT = "Please read the following text and answer the question below.\n\n<text>\n{text}\n</text>\n\n"
QUESTION = (
    "What is the correct answer to this question: {question}\nChoices:\n(A) {a}\n(B) {b}\n(C) {c}\n(D) {d}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One question."""

    domain: str
    difficulty: str
    length: str
    question: str
    choice_A: str
    choice_B: str
    choice_C: str
    choice_D: str
    answer: Literal["A", "B", "C", "D"]
    context: str


def _read(data: DataFolder) -> list[Row]:
    path = data.find(*PLACES) or data.download("THUDM/LongBench-v2", "data.json", "LongBench v2", PLACES)
    if path.suffix == ".jsonl":
        return read_rows(path, Row)
    rows = read_json(path, list[dict[str, Any]])
    if not rows:
        raise UsageError(f"{path} holds no rows.")
    return [row_of(row, Row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]


def _items(lm: LanguageModel, data: DataFolder, asked: Asked) -> list[Item]:
    room = room_of(lm, asked.length, MAX_NEW_TOKENS)
    found = []
    for number, row in enumerate(_read(data)[: asked.limit]):
        options = {letter: getattr(row, f"choice_{letter.upper()}").strip() for letter in "abcd"}
        context = CONTEXT.format(text=row.context.strip())
        question = QUESTION.format(question=row.question.strip(), **options)
        context, question = cut_middle(lm, context, question, room)
        groups = (f"difficulty: {row.difficulty}", f"length: {row.length}", f"domain: {row.domain}")
        found.append(
            Item(
                id=f"longbench-v2/{number}",
                task="longbench-v2",
                context=context,
                question=question,
                answers=(row.answer,),
                metric="option",
                max_new_tokens=MAX_NEW_TOKENS,
                groups=groups,
            )
        )
    return found


LONGBENCH_V2 = Suite(
    name="longbench-v2",
    title="LongBench v2: questions with four options",
    tasks=("longbench-v2",),
    about=(
        "Score: the fraction of answers that name the right option in the form that is asked for; answers that name "
        "none are wrong. Greedy decoding, where the benchmark draws with temperature 0.1. Prompts that exceed the "
        "length lose their middle, as in the benchmark."
    ),
    items=_items,
    check=lambda data, asked: _read(data),
    length=4096,
    limit=50,
)
