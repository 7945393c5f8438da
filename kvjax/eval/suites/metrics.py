"""The score of an answer, by the name of its metric."""

from __future__ import annotations

from collections.abc import Callable

from kvjax.eval import ruler
from kvjax.eval.suites import choice_metrics as choice
from kvjax.eval.suites import scbench_metrics as scbench
from kvjax.eval.suites import text_metrics as text
from kvjax.eval.suites.item import Item
from kvjax.eval.suites.rouge import rouge_lsum

Metric = Callable[[str, Item], float]


def _best(score: Callable[[str, str], float]) -> Metric:
    """The best score against any of the references."""
    return lambda prediction, item: max((score(prediction, wanted) for wanted in item.answers), default=0.0)


def _first_line(score: Callable[[str, str], float]) -> Metric:
    best = _best(score)
    return lambda prediction, item: best(text.first_line(prediction), item)


def _classified(prediction: str, item: Item) -> float:
    line = text.first_line(prediction)
    return max((text.classification(line, wanted, item.classes) for wanted in item.answers), default=0.0)


def _any_contained(prediction: str, item: Item) -> float:
    """RULER's ``string_match_part``."""
    found = ruler.post_process(prediction).lower()
    return float(any(wanted.lower() in found for wanted in item.answers))


METRICS: dict[str, Metric] = {
    "string_match_all": lambda prediction, item: ruler.match_all(prediction, item.answers),
    "string_match_part": _any_contained,
    "partial match": _best(text.longest_run),
    "exact match": _best(text.contains),
    "ROUGE-L": _best(text.rouge_l),
    "ROUGE-L, first line": _first_line(text.rouge_l),
    "ROUGE-L zh": _best(text.rouge_l_zh),
    "F1": _best(text.qa_f1),
    "F1, first line": _first_line(text.qa_f1),
    "F1 zh": _best(text.qa_f1_zh),
    "classification": _classified,
    "count": _best(text.count_share),
    "retrieval": _best(text.paragraph_share),
    "code similarity": _best(text.code_similarity),
    "option": lambda prediction, item: float(text.option_letter(prediction) in item.answers),
    "containment": _best(text.contains),
    "label in answer": lambda prediction, item: scbench.holds(prediction, item.answers),
    "label in answer, any case": lambda prediction, item: scbench.holds_any_case(prediction, item.answers),
    "names found": lambda prediction, item: scbench.names_found(prediction, item.answers),
    "first digits": _best(scbench.first_digits),
    "first number": _best(scbench.first_number),
    "option named": lambda prediction, item: scbench.option_named(prediction, item.answers),
    "F1 of characters": _best(scbench.character_f1),
    "ROUGE-Lsum": _best(rouge_lsum),
    "function found": lambda prediction, item: scbench.function_found(prediction, item.answers[0], item.classes),
    "accuracy": lambda prediction, item: choice.likeliest(prediction, item.answers),
    "accuracy by length": lambda prediction, item: choice.likeliest_by_length(
        prediction, item.answers, [len(one.strip()) for one in item.choices]
    ),
    "next tokens": lambda prediction, item: choice.next_tokens(prediction),
    "mean probability": lambda prediction, item: choice.mean_probability(prediction),
}
#: A second metric that a report shows beside the first.
ALSO: dict[str, str] = {
    "partial match": "exact match",
    "accuracy": "accuracy by length",
    "next tokens": "mean probability",
}


def score(prediction: str, item: Item, metric: str | None = None) -> float:
    """The score of an answer, 0 to 1."""
    return METRICS[metric or item.metric](prediction, item)
