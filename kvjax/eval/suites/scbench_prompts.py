"""SCBench's prompts (Li et al. 2024, arXiv:2412.10319): words of the benchmark's repository, which is under MIT."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Kind:
    """How one of the benchmark's questions is asked and scored.

    Attributes:
      metric: a name of ``kvjax.eval.suites.metrics.METRICS``.
      max_new_tokens: of an answer.
      before: words before the context. question: around the question's own words, which stand at ``{input}``.
    """

    metric: str
    max_new_tokens: int
    before: str = ""
    question: str = "{input}"


_FIRST, _LATER = "The the correct answer is", "The letter of the correct answer is"
_CHOICE = f"Question: {{input}}\nA. {{A}}\nB. {{B}}\nC. {{C}}\nD. {{D}}\n\n{_FIRST}"
_REPOQA = (
    "Based on the function description and code context, please retrieve and repeat the exact described function from "
    "the code context in a code block wrapped by ```:\n\n"
)

#: The kinds of questions; a mixed task has two of them.
KINDS: dict[str, Kind] = {
    "kv": Kind(
        "label in answer",
        150,
        "Extract the value corresponding to the specified key in the JSON object below.\n\n",
    ),
    "prefix_suffix": Kind("label in answer", 150),
    "vt": Kind("names found", 30),
    "repoqa": Kind("function found", 1024, _REPOQA),
    "qa_eng": Kind(
        "label in answer, any case",
        40,
        "Read the book and answer the question. Be very concise in your answer.\n\n",
        "Question: {input}\nAnswer:",
    ),
    "qa_chn": Kind("F1 of characters", 40, "阅读以下书籍然后回答问题。\n\n", "问题：{input}\n答案："),
    "choice_eng": Kind("option named", 40, "Read the book and answer the question.\n\n", _CHOICE),
    "many_shot": Kind("label in answer, any case", 10),
    "summary": Kind("ROUGE-Lsum", 200),
    "mf": Kind("first number", 5, question="{target}\n\n{input}"),
}
#: Tasks of two kinds of questions about one context: of each kind the benchmark's name and its own length of answers.
MIXED: dict[str, dict[str, Kind]] = {
    "summary_with_needles": {
        "scbench_summary": Kind("ROUGE-Lsum", 800),
        "scbench_passkey": Kind("first digits", 15),
    },
    "repoqa_and_kv": {
        "scbench_repoqa": Kind("function found", 1024),
        "scbench_kv": Kind("label in answer", 80),
    },
}
TASKS = (
    "kv",
    "prefix_suffix",
    "vt",
    "repoqa",
    "qa_eng",
    "qa_chn",
    "choice_eng",
    "many_shot",
    "summary",
    "mf",
    "summary_with_needles",
    "repoqa_and_kv",
)
_LETTERS = "ABCD"


def question_text(kind: Kind, words: str, options: Sequence[str] | None) -> str:
    """A question in its task's words."""
    parts = {"input": words}
    if "{target}" in kind.question:
        parts["target"] = target(words)
    if options:
        parts |= dict(zip(_LETTERS, options, strict=True))
    # Not str.format: a question may hold braces.
    return re.sub(r"\{(\w+)\}", lambda match: parts[match[1]], kind.question)


def later_choice(text: str) -> str:
    """A choice as a later turn of a dialogue asks for it where there is no chat template."""
    return text.removesuffix(_FIRST) + _LATER


def target(words: str) -> str:
    """The number that a question of ``mf`` asks for, as a question of its own."""
    found = re.search(r"The .+ is", words)
    return f"What is {found[0].lower()[:-3]}?" if found else ""


def references(task: str, answer: Any, options: Sequence[str] | None) -> tuple[str, ...]:
    """The answers as the metric reads them: of a choice its words and its letter."""
    if task == "choice_eng" and options and answer in options:
        return str(answer), _LETTERS[list(options).index(answer)]
    return tuple(map(str, answer)) if isinstance(answer, list | tuple) else (str(answer),)


def spoken(answer: Any) -> str:
    """The reference as the answer of an earlier turn."""
    return ", ".join(map(str, answer)) if isinstance(answer, list | tuple) else str(answer)
