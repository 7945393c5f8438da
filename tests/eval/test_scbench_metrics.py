"""SCBench's metrics against the scores of the benchmark's own code (scripts/golden_scbench.py)."""

from __future__ import annotations

import json
import pathlib

import pytest

from kvjax.eval.suites.bleu import bleu
from kvjax.eval.suites.item import Item
from kvjax.eval.suites.metrics import score

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "scbench.json").read_text())
METRICS = sorted({case["metric"] for case in GOLDEN["scores"]})


@pytest.mark.parametrize("metric", METRICS)
def test_scores_are_the_benchmarks(metric):
    cases = [case for case in GOLDEN["scores"] if case["metric"] == metric]
    assert len({case["score"] for case in cases}) > 1
    for case in cases:
        classes = tuple(case.get("classes", ()))
        item = Item("x", "x", "c", "q", tuple(case["answers"]), metric, 8, classes=classes)
        assert score(case["prediction"], item) == pytest.approx(case["score"], abs=1e-12), case


def test_every_metric_of_the_benchmark_has_golden_scores():
    from kvjax.eval.suites.scbench_prompts import KINDS, MIXED

    kinds = [*KINDS.values(), *(kind for parts in MIXED.values() for kind in parts.values())]
    assert {kind.metric for kind in kinds} == set(METRICS)


def test_bleu_is_nltks():
    assert len({round(value, 6) for *_, value in GOLDEN["similar"]}) > 10
    for said, wanted, value in GOLDEN["similar"]:
        assert bleu(said.strip().split(), wanted.strip().split()) == pytest.approx(value, abs=1e-12)


def test_an_answer_of_several_functions_is_compared_whole():
    """The benchmark takes the first function of a block with a parser; here all of the block is compared."""
    code = "def f():\n    return 1\n"
    item = Item("x", "x", "c", "q", (code,), "function found", 8, classes=(code,))
    assert score(f"```\n{code}```", item) == 1
    assert score(f"```\n{code}\n\ndef other_function(with_arguments):\n    return 2\n```", item) == 0
