"""LongMemEval's questions out of each of the files that users have: chats in full, ready prompts, a subset."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvjax.errors import UsageError, quoted
from kvjax.eval.suites.data import DataFolder, read_json, read_rows, row_of

#: Ready prompts of notes that another model took of every chat with the question in view: 2,400 to 7,000 tokens.
NOTES = "longmemeval/longmemeval_rag_prompts_236.jsonl"
#: A few records of the benchmark with other questions about the same chats beside its own.
SUBSET = "longmemeval/longmemeval_s_subset.json"
#: Files of the folder, the first of which is read: whole ones, then what stands in for them, most questions first.
PLACES = (
    "longmemeval/longmemeval_s_cleaned.json",
    "longmemeval/longmemeval_s.json",
    "longmemeval/longmemeval_oracle.json",
    NOTES,
    SUBSET,
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
#: Where the question of a ready prompt begins.
MARK = "\n\nCurrent Date:"
_SESSION = "\n### Session {number}:\nSession Date: {date}\nSession Content:\n\n{content}\n"
_MAX_NEW_TOKENS = 100
#: Of answers that are asked for "step by step": notes first, then what follows from them.
_STEPS_TOKENS = 300


@dataclasses.dataclass(frozen=True)
class Question:
    """One question with its text.

    Attributes:
      head: what begins the prompt whatever the length. history: makes the text whose end is cut where it exceeds that.
      question: all that follows it. max_new_tokens: of the answer.
    """

    id: str
    type: str
    head: str
    history: Callable[[], str]
    question: str
    answer: str
    max_new_tokens: int = _MAX_NEW_TOKENS


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


@dataclasses.dataclass(frozen=True)
class SubsetRow:
    """Several questions about the same chats, each with its answer and the ids of the chats that hold it."""

    question_id: str
    question_type: str
    questions: tuple[str, ...]
    answers: tuple[str | int | float, ...]
    answer_session_ids: tuple[tuple[str, ...], ...]
    question_date: str
    haystack_dates: tuple[str, ...]
    haystack_sessions: tuple[tuple[dict[str, Any], ...], ...]


@dataclasses.dataclass(frozen=True)
class NotesRow:
    """A ready prompt, with its question at the end."""

    question_id: str
    question_type: str
    prompt: str
    correct_answer: str | int | float


def history(row: Row) -> str:
    """The chats in the order of their dates, each turn as JSON without its mark of evidence."""
    chats = sorted(zip(row.haystack_dates, row.haystack_sessions, strict=True), key=lambda chat: chat[0])
    texts = []
    for number, (date, turns) in enumerate(chats, 1):
        plain = [{name: turn[name] for name in turn if name != "has_answer"} for turn in turns]
        texts.append(_SESSION.format(number=number, date=date, content=json.dumps(plain)))
    return "".join(texts)


def read_questions(data: DataFolder) -> list[Question]:
    """The questions that can be scored without a judge, of the first file that there is, else of the hub's."""
    path = data.find(*PLACES) or data.download(
        "xiaowu0162/longmemeval-cleaned", "longmemeval_s_cleaned.json", "LongMemEval", PLACES
    )
    name = path.name
    read = _notes if name == Path(NOTES).name else _subset if name == Path(SUBSET).name else _chats
    found = read(path)
    if twice := [name for name, count in Counter(one.id for one in found).items() if count > 1]:
        raise UsageError(f"{path} has two questions with the id {quoted(twice[0])}.")
    scored = [one for one in found if one.type in TYPES and not one.id.endswith("_abs")]
    if not scored:
        raise UsageError(
            f"{path} holds no question that is scored: all are preferences or cannot be answered, or none."
        )
    return scored


def _chats(path: Path) -> list[Question]:
    rows = read_json(path, list[dict[str, Any]])
    return [_asked(path, row_of(row, Row, f"{path}, row {number}")) for number, row in enumerate(rows, 1)]


def _asked(path: Path, row: Row) -> Question:
    if len(row.haystack_dates) != len(row.haystack_sessions):
        raise UsageError(f"{path}: {row.question_id} has not a date for each of its chats.")
    question = QUESTION.format(date=row.question_date, question=row.question)
    answer = str(row.answer)
    return Question(row.question_id, row.question_type, INSTRUCTION, lambda: history(row), question, answer)


def _subset(path: Path) -> list[Question]:
    """The benchmark's own question of each record, which is the one whose chats have ids that begin with ``answer_``.

    It stands first in most records, and one has it not: its questions are all about chats that the benchmark added as
    distractors, made by the file's authors, and neither the record's id nor its type is of any of them.
    """
    found = []
    for number, line in enumerate(read_json(path, list[dict[str, Any]]), 1):
        where = f"{path}, row {number}"
        row: SubsetRow = row_of(line, SubsetRow, where)
        if not len(row.questions) == len(row.answers) == len(row.answer_session_ids):
            raise UsageError(f"{where} has not an answer and its chats for each of its questions.")
        for question, answer, chats in zip(row.questions, row.answers, row.answer_session_ids, strict=True):
            if chats and all(chat.startswith("answer_") for chat in chats):
                about = row.question_date, row.haystack_dates, row.haystack_sessions
                found.append(_asked(path, Row(row.question_id, row.question_type, question, answer, *about)))
                break
    return found


def _notes(path: Path) -> list[Question]:
    found = []
    for number, row in enumerate(read_rows(path, NotesRow), 1):
        place = row.prompt.rfind(MARK)
        if place <= 0:
            raise UsageError(f"{path}, row {number} is no prompt whose question begins with {MARK!r}.")
        context, question, answer = row.prompt[:place], row.prompt[place:], str(row.correct_answer)
        one = Question(
            row.question_id, row.question_type, "", lambda text=context: text, question, answer, _STEPS_TOKENS
        )
        found.append(one)
    return found
