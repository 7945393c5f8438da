"""The suite ``short``: short questions with given choices, after worked examples, by log-likelihood."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from kvjax.checkpoints.load import LanguageModel
from kvjax.documents import NotADocument, parse_json
from kvjax.errors import KvjaxError, UsageError, missing_extra
from kvjax.eval.suites.data import DataFolder, read_text
from kvjax.eval.suites.item import Asked, Item, Suite
from kvjax.eval.suites.short_tasks import TASKS, Question

#: Worked examples before a question.
SHOTS = 5
#: What follows a worked example.
_BETWEEN = "\n\n"


def _places(task: str, split: str) -> str:
    return f"short/{task}.train.jsonl" if split == "train" else f"short/{task}.jsonl"


@functools.lru_cache(maxsize=32)
def _read(path: Path, task: str) -> tuple[Question, ...]:
    """The questions of a file of JSON lines or a Parquet file; UsageError says which row is none."""
    rows = _parquet(path) if path.suffix == ".parquet" else _lines(path)
    found = []
    for number, row in enumerate(rows, 1):
        try:
            question = TASKS[task].read(row)
            whole = type(question.right) is int  # neither true nor 0.5 is the number of a choice
            if (
                not whole
                or not 0 <= question.right < len(question.choices)
                or not all(map(str.strip, question.choices))
            ):
                raise ValueError("no choice is the right one")
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise UsageError(f"{path}, row {number} is no row of {task}.") from error
        found.append(question)
    if not found:
        raise UsageError(f"{path} holds no rows.")
    return tuple(found)


def _lines(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                rows.append(parse_json(line))
            except NotADocument as error:
                raise UsageError(f"{path}, line {number} is no JSON: {error}.") from error
    return rows


def _parquet(path: Path) -> list[Any]:
    try:
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise KvjaxError(
            missing_extra("Data sets of the hub are Parquet files, which the package pyarrow reads", "eval")
        ) from error
    return pyarrow.parquet.read_table(path).to_pylist()


def _questions(data: DataFolder, task: str, split: str) -> tuple[Question, ...]:
    """A task's questions of a split: the folder's, else the hub's. The folder may leave out the worked examples."""
    path = data.find(_places(task, split))
    if path is None and split == "train" and data.find(_places(task, "")) is not None:
        return ()
    if path is None:
        known = TASKS[task]
        name = f"{known.config}/{known.split if split != 'train' else split}/0000.parquet"
        path = data.download(
            known.repo, name, f"The data set {task}", [_places(task, split)], revision="refs/convert/parquet"
        )
    return _read(path, task)


def _parts(data: DataFolder, asked: Asked, task: str) -> tuple[list[Question], list[Question]]:
    """Worked examples and the questions that are asked; without a file of examples the first questions serve."""
    shots = 2 if asked.quick else SHOTS
    examples, questions = list(_questions(data, task, "train")), list(_questions(data, task, ""))
    if not examples:
        examples, questions = questions[:shots], questions[shots:]
    if not questions:
        raise UsageError(f"The file of {task} holds no more than its {shots} worked examples.")
    return examples[:shots], questions[: asked.limit]


def _items(lm: LanguageModel, data: DataFolder, asked: Asked) -> list[Item]:
    most = min(asked.length or lm.config.max_position, lm.config.max_position)
    count = lm.tokenizer.encode
    found = []
    for task in asked.tasks:
        examples, questions = _parts(data, asked, task)
        shown = [f"{one.text}{one.choices[one.right]}{_BETWEEN}" for one in examples]
        for number, question in enumerate(questions):
            longest = max(len(count(choice)) for choice in question.choices)
            room = most - len(lm.tokenizer.prefix_ids) - len(count(question.text)) - longest
            kept = shown
            while kept and len(count("".join(kept))) > room:
                kept = kept[1:]
            if not kept:
                raise UsageError(f"{most} tokens leave no room for a worked example of {task}, which is its context.")
            context, text = "".join(kept), question.text
            if not text:  # the sentence begins with its gap, and something is read before a choice
                context, text = context.removesuffix(_BETWEEN), _BETWEEN
            found.append(
                Item(
                    id=f"{task}/{number}",
                    task=task,
                    context=context,
                    question=text,
                    answers=(str(question.right),),
                    metric="accuracy",
                    max_new_tokens=0,
                    chat=False,
                    choices=question.choices,
                )
            )
    return found


SHORT = Suite(
    name="short",
    title="Short questions with given choices",
    tasks=tuple(TASKS),
    about=(
        "Score: the fraction of questions whose right choice is the likeliest; by length: log-probabilities over the "
        f"choices' characters. Prompts are lm-evaluation-harness's, without chat template, after up to {SHOTS} worked "
        "examples, which are what is compressed. winogrande scores the rest of the sentence with either name in it."
    ),
    items=_items,
    check=lambda data, asked: [_parts(data, asked, task) for task in asked.tasks],
    limit=100,
    quick_limit=4,
)
