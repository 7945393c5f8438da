"""Short tasks with given choices, in lm-evaluation-harness's words; rows are those of each data set on the hub."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with its choices, each with its leading space, and the number of the right one."""

    text: str
    choices: tuple[str, ...]
    right: int


@dataclasses.dataclass(frozen=True)
class ShortTask:
    """One data set.

    Attributes:
      read: its row as a question; KeyError, ValueError or TypeError where it is no such row.
      repo, config: where it is on the hub. split: what is asked; worked examples are of "train".
    """

    read: Callable[[Row], Question]
    repo: str
    config: str
    split: str


def _labelled(row: Row, text: str) -> Question:
    """A row whose choices have letters or numbers as names."""
    choices, labels = row["choices"]["text"], list(row["choices"]["label"])
    return Question(text, tuple(f" {choice}" for choice in choices), labels.index(row["answerKey"]))


def _openbookqa(row: Row) -> Question:
    return _labelled(row, row["question_stem"])


def _arc(row: Row) -> Question:
    return _labelled(row, f"Question: {row['question']}\nAnswer:")


def _wic(row: Row) -> Question:
    word = row["sentence1"][row["start1"] : row["end1"]]  # as it stands there
    text = (
        f"Sentence 1: {row['sentence1']}\nSentence 2: {row['sentence2']}\nQuestion: Is the word '{word}' used in the "
        "same way in the two sentences above?\nAnswer:"
    )
    return Question(text, (" no", " yes"), row["label"])


def _winogrande(row: Row) -> Question:
    before, mark, after = row["sentence"].partition("_")
    if not mark:
        raise ValueError("the sentence has no gap")
    before = before.strip()
    gap = " " if before else ""
    choices = tuple(f"{gap}{row[name]} {after.strip()}" for name in ("option1", "option2"))
    return Question(before, choices, int(row["answer"]) - 1)


def _copa(row: Row) -> Question:
    joint = {"cause": "because", "effect": "therefore"}[row["question"]]
    choices = (row["choice1"], row["choice2"])
    text = f"{row['premise'].strip()[:-1]} {joint}"
    return Question(text, tuple(f" {choice[:1].lower()}{choice[1:]}" for choice in choices), row["label"])


def _piqa(row: Row) -> Question:
    return Question(f"Question: {row['goal']}\nAnswer:", (f" {row['sol1']}", f" {row['sol2']}"), row["label"])


def _rte(row: Row) -> Question:
    text = f"{row['sentence1']}\nQuestion: {row['sentence2']} True or False?\nAnswer:"
    return Question(text, (" True", " False"), row["label"])


def _mathqa(row: Row) -> Question:
    found = re.findall(r"[abcd] \) .*?, |e \) .*?$", row["options"])
    choices = tuple(f" {option[4:].rstrip(' ,')}" for option in found)
    return Question(f"Question: {row['Problem']}\nAnswer:", choices, list("abcde").index(row["correct"]))


#: AhaKV's four data sets (Figure 4), then those that H2O reports beside them.
TASKS: dict[str, ShortTask] = {
    "openbookqa": ShortTask(_openbookqa, "allenai/openbookqa", "main", "test"),
    "arc_easy": ShortTask(_arc, "allenai/ai2_arc", "ARC-Easy", "test"),
    "wic": ShortTask(_wic, "aps/super_glue", "wic", "validation"),
    "winogrande": ShortTask(_winogrande, "allenai/winogrande", "winogrande_xl", "validation"),
    "copa": ShortTask(_copa, "aps/super_glue", "copa", "validation"),
    "piqa": ShortTask(_piqa, "ybisk/piqa", "plain_text", "validation"),
    "rte": ShortTask(_rte, "nyu-mll/glue", "rte", "validation"),
    "mathqa": ShortTask(_mathqa, "allenai/math_qa", "default", "test"),
}
