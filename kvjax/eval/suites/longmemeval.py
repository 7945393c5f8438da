"""The suite ``longmemeval``: questions about many chats (Wu et al. 2024, arXiv:2410.10813), by type of question."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError, quoted
from kvjax.eval.suites.data import DataFolder, from_hub, read_json, row_of
from kvjax.eval.suites.item import Asked, Item, Suite
from kvjax.eval.suites.prompts import room_of

MAX_NEW_TOKENS = 100
PLACES = (
    "longmemeval/longmemeval_s_cleaned.json",
    "longmemeval/longmemeval_s.json",
    "longmemeval/longmemeval_oracle.json",
    "longmemeval/longmemeval_sample_adit.json",  # a few of its questions, as published for trying out
)
#: Types whose answer is a text that an answer can contain; a preference's is a rubric, which only a judge can read.
TYPES = (
    "single-session-user",
    "single-session-assistant",
    "multi-session",
    "temporal-reasoning",
    "knowledge-update",
)
INSTRUCTION = (
    "I will give you several history chats between you and a user. Please answer the question based on the relevant "
    "chat history.\n\n\nHistory Chats:\n\n"
)
QUESTION = "\n\nCurrent Date: {date}\nQuestion: {question}\nAnswer:"
_SESSION = "\n### Session {number}:\nSession Date: {date}\nSession Content:\n\n{content}\n"


@dataclasses.dataclass(frozen=True)
class Row:
    """One question with its chats; an answer may be a number."""

    question_id: str
    question_type: str
    question: str
    answer: str | int | float
    question_date: str
    haystack_dates: tuple[str, ...]
    haystack_sessions: tuple[tuple[dict[str, Any], ...], ...]


def history(row: Row) -> str:
    """The chats in the order of their dates, each turn as JSON without its mark of evidence."""
    chats = sorted(zip(row.haystack_dates, row.haystack_sessions, strict=True), key=lambda chat: chat[0])
    texts = []
    for number, (date, turns) in enumerate(chats, 1):
        plain = [{name: turn[name] for name in turn if name != "has_answer"} for turn in turns]
        texts.append(_SESSION.format(number=number, date=date, content=json.dumps(plain)))
    return "".join(texts)


def _read(data: DataFolder) -> list[Row]:
    path = data.find(*PLACES) or from_hub(
        "xiaowu0162/longmemeval-cleaned", "longmemeval_s_cleaned.json", "LongMemEval", PLACES
    )
    rows = read_json(path, list[dict[str, Any]])
    found = [row_of(row, Row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]
    if twice := [name for name, count in Counter(row.question_id for row in found).items() if count > 1]:
        raise UsageError(f"{path} has two questions with the id {quoted(twice[0])}.")
    for row in found:
        if len(row.haystack_dates) != len(row.haystack_sessions):
            raise UsageError(f"{path}: {row.question_id} has not a date for each of its chats.")
    return [row for row in found if row.question_type in TYPES and not row.question_id.endswith("_abs")]


def _items(lm: LanguageModel, data: DataFolder, asked: Asked) -> list[Item]:
    encode, decode = lm.tokenizer.encode, lm.tokenizer.decode
    found, counts = [], Counter[str]()
    for row in sorted(_read(data), key=lambda row: TYPES.index(row.question_type)):
        enough = asked.limit is not None and counts[row.question_type] >= asked.limit
        if row.question_type not in asked.tasks or enough:
            continue
        counts[row.question_type] += 1
        question = QUESTION.format(date=row.question_date, question=row.question)
        room = room_of(lm, asked.length, MAX_NEW_TOKENS) - len(encode(INSTRUCTION)) - len(encode(question)) - 4
        if room < 1:
            raise UsageError(f"The length leaves no room for the chats of {row.question_id}.")
        text = history(row)
        ids = encode(text)
        while len(ids) > room:  # the benchmark keeps the first tokens; as text they may be more than they were
            text = decode(ids[: room - 1])
            ids = encode(text)
        found.append(
            Item(
                id=row.question_id,
                task=row.question_type,
                context=INSTRUCTION + text,
                question=question,
                answers=(str(row.answer),),
                metric="containment",
                max_new_tokens=MAX_NEW_TOKENS,
            )
        )
    return found


LONGMEMEVAL = Suite(
    name="longmemeval",
    title="LongMemEval by type of question: a proxy without a judge",
    tasks=TYPES,
    about=(
        "Score: the fraction of answers that contain the reference once both are normalised. This is NOT the "
        "benchmark's metric, for which a large model judges each answer; it compares caches with each other only. "
        "Preferences and questions that cannot be answered need the judge, and are left out. Chats beyond "
        "the length are left out from the end, as in the benchmark."
    ),
    items=_items,
    check=lambda data, asked: _read(data),
    limit=50,
)
