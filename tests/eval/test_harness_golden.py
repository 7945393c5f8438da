"""With the full cache, scores and answers are those of lm-evaluation-harness's own ``hf`` backend on the default model.

``scripts/golden_harness.py`` asked that backend. What the adapter calls for each request is compared here without the
harness; where it is installed its tasks are asked of the adapter too, and their scores compared.
"""

from __future__ import annotations

import json
import os
import pathlib

import numpy as np
import pytest
from support.harness_tasks import with_data

import kvjax

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when the harness is imported
GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "harness.json").read_text("utf-8"))
TASKS = GOLDEN["tasks"]
#: Relative, and absolute for what is nearly certain: the sums of two libraries in float32.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
#: Rows at a time.
BATCH = 16


def totals_and_flags(lm: kvjax.LanguageModel, requests: list[dict]) -> tuple[list[float], list[bool]]:
    """What the adapter's scoring finds of requests, in batches of similar lengths."""
    order = sorted(range(len(requests)), key=lambda i: len(requests[i]["context"]) + len(requests[i]["continuation"]))
    found = {}
    for some in (order[start : start + BATCH] for start in range(0, len(order), BATCH)):
        contexts, continuations = ([requests[i][part] for i in some] for part in ("context", "continuation"))
        scores = kvjax.score(lm, contexts, continuations, policy="full", chat=False)
        found |= {i: (one.total, one.is_greedy) for i, one in zip(some, scores, strict=True)}
    both = [found[i] for i in range(len(requests))]
    return [total for total, _ in both], [greedy for _, greedy in both]


def assert_as_recorded(lm: kvjax.LanguageModel, requests: list[dict]) -> list[float]:
    totals, flags = totals_and_flags(lm, requests)
    np.testing.assert_allclose(totals, [one["logprob"] for one in requests], **TOLERANCE)
    assert flags == [one["is_greedy"] for one in requests]
    return totals


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_continuations_have_the_backends_log_probabilities(default_model, every):
    task, encode = TASKS["choices"], default_model.tokenizer.encode
    asked = [f"{row['text']} {choice}" for row in task["rows"] for choice in row["choices"]]
    for one, text in zip(task["requests"], asked, strict=True):
        assert one["context"] + one["continuation"] == encode(text)
    some = [one for one in task["requests"] if one["item"] % every == 0]
    totals = assert_as_recorded(default_model, some)
    assert 0 < sum(one["is_greedy"] for one in some) < len(some)  # or flags would say nothing
    if every == 1:
        items = np.array([one["item"] for one in some])
        best = [np.argmax(np.array(totals)[items == number]) for number in range(len(task["rows"]))]
        assert np.mean(np.equal(best, [row["gold"] for row in task["rows"]])) == task["scores"]["acc,none"]


@pytest.mark.slow
def test_texts_have_the_backends_log_probabilities(default_model):
    task = TASKS["texts"]
    assert len(task["requests"]) > len(task["rows"])  # a text has several windows
    totals = assert_as_recorded(default_model, task["requests"])
    assert sum(totals) == pytest.approx(sum(task["totals"]), rel=TOLERANCE["rtol"])


@pytest.mark.slow
def test_answers_are_the_backends(default_model):
    task = TASKS["answers"]
    asked = task["config"]["generation_kwargs"]
    how = {"policy": "full", "chat": False, "stop": asked["until"], "max_new_tokens": asked["max_gen_toks"]}
    contexts = [one["context"] for one in task["requests"]]
    assert contexts == [default_model.tokenizer.encode(row["text"]) for row in task["rows"]]
    outputs = kvjax.generate(default_model, contexts, **how)
    assert [output.text for output in outputs] == [one["text"] for one in task["requests"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_the_harness_gives_tasks_the_backends_scores(default_model, tmp_path, name):
    lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed; the extra lm-eval has it")
    from kvjax.eval.harness import HarnessModel

    task = TASKS[name]
    model = HarnessModel(default_model, max_length=GOLDEN["max_length"], batch_size=BATCH)
    given = with_data(tmp_path, name, task)
    found = lm_eval.simple_evaluate(model=model, tasks=[given], bootstrap_iters=0, log_samples=True)
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    responses = [response for sample in samples for response in sample["resps"]]
    if name == "answers":
        assert [one[0] for one in responses] == [one["text"] for one in task["requests"]]
    elif name == "texts":
        np.testing.assert_allclose([one[0] for one in responses], task["totals"], **TOLERANCE)
    else:
        np.testing.assert_allclose(
            [one[0][0] for one in responses], [one["logprob"] for one in task["requests"]], **TOLERANCE
        )
        assert [one[0][1] for one in responses] == [one["is_greedy"] for one in task["requests"]]
    for score, value in task["scores"].items():
        assert found["results"][name][score] == pytest.approx(value, rel=1e-4), score
