"""Results that a run goes on from, changed by hand: numbers that no run writes are refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from support import suite_runs

from kvjax.errors import KvjaxError
from kvjax.eval import results, round_questions
from kvjax.eval.recommend import folder
from kvjax.eval.recommend.measure import Measured


def refused(read: Callable[[], Any], *said: str) -> None:
    """Check that reading raises one sentence that says all of this."""
    with pytest.raises(KvjaxError) as error:
        read()
    sentence = str(error.value)
    assert len(sentence) < 300 and "\n" not in sentence and sentence.endswith("."), sentence
    assert "Value error" not in sentence and all(part in sentence for part in said), sentence


# --- kvjax compare-rounds -------------------------------------------------------------------------------------------

ASKED = round_questions.Settings("m", "float32", "d", 100, 8, 2)
ANSWER = round_questions.Answer(
    "d-0", "k", 0, "round:top=1", 3, (0, 2), (1,), (5, 6), 1, None, 8, 9, 1, 4, 1, 1, (1.0, 2.0), (2.0, 3.0), 2, None
)


def answers_of(path, *changes: dict[str, Any]) -> list[round_questions.Answer]:
    rows = [dataclasses.asdict(ANSWER) | change for change in changes]
    path.write_text(json.dumps({"settings": dataclasses.asdict(ASKED), "answers": rows}))
    return round_questions.read_answers(path, ASKED)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("full_bytes", 0), ("seen", 0), ("live_bytes", 10**400), ("live_bytes", 10**40), ("live_bytes", -1),
        ("allocated_bytes", -1), ("peak_bytes", 2**61), ("host_bytes", -1), ("moved_bytes", -1), ("rounds", -3),
        ("agrees", 50), ("agrees", 3), ("tokens", []), ("tokens", [-1, 6]), ("used", -7), ("used", 10),
        ("selected", [99, -1]), ("selected", [0, 0]), ("gold", [3]), ("seconds", [math.nan, 1.0]),
        ("seconds", [1e308, 1.0]), ("full_seconds", [1e-320, 1.0]), ("policy", "zzz"), ("policy", "lagkv"),
        ("policy", ""), ("asked", -1),
    ],
)  # fmt: skip
def test_an_answer_of_compare_rounds_has_numbers_of_an_answer(name, value, tmp_path):
    path = tmp_path / "answers.json"
    assert answers_of(path, {}, {"policy": "full"}, {"policy": "rounds:profile=gone.yaml,was=1"})
    said = () if name == "tokens" else (name,)  # without tokens, more agree than there are
    refused(lambda: answers_of(path, {name: value}), "is not what compare-rounds writes", *said)


def test_a_question_is_answered_once_under_a_policy(tmp_path):
    refused(lambda: answers_of(tmp_path / "answers.json", {}, {"used": 7}), "answered twice")


def test_an_answer_is_to_a_question_of_its_dialogue(tiny_model, tmp_path):
    from kvjax.eval.dialogues import Dialogue, Question

    talk = Dialogue("d-0", (("a", "b"),) * 3, (Question("c"),))
    for asked, said in ((99, "question 99 of d-0"), (1, "question 1 of d-0")):
        (answer,) = answers_of(tmp_path / "answers.json", {"asked": asked})
        run = round_questions.RoundComparison(
            tiny_model, [], ASKED, answers=[answer], save=lambda _: None, say=lambda _: None
        )
        refused(lambda run=run: run.run([talk]), said)


# --- kvjax recommend ------------------------------------------------------------------------------------------------

FOLDER = folder.Settings("m", "float32", "model", "ab", 300, 1, 300, 2, 1, 0)
FULL, HALF = Measured("full", 100, (1.0, 0.0), (2.0, 2.5)), Measured("lagkv:ratio=0.5", 50, (1.0, 0.0), (2.1, 2.6))


def measured(path, *rows: dict[str, Any]) -> list[Measured]:
    path.mkdir(exist_ok=True)
    (path / "measured.json").write_text(json.dumps({"settings": dataclasses.asdict(FOLDER), "rows": rows}))
    return folder.Folder(path, FOLDER).earlier()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("found", [], "found of"), ("found", [math.nan, 0.0], "needle"), ("found", [-5.0, 1.0], "needle"),
        ("found", [1.0] * 3, "has not 2"), ("losses", [], "losses of"), ("losses", [math.nan, 1.0], "loss"),
        ("losses", [1e308, 1e308], "loss"), ("losses", [-3.0, 1.0], "loss"), ("losses", [1.0], "2 in losses"),
        ("cache_bytes", -1, "cache_bytes"), ("cache_bytes", 0, "cache_bytes"), ("cache_bytes", 10**40, "cache_bytes"),
        ("policy", "full", "two rows"), ("policy", "", "policy"), ("policy", "x" * 5000, "policy"),
    ],
)  # fmt: skip
def test_a_row_of_recommend_has_numbers_of_a_measurement(name, value, said, tmp_path):
    full, half = map(dataclasses.asdict, (FULL, HALF))
    unknown = dataclasses.asdict(Measured("zzz", refused="No."))
    assert measured(tmp_path, full, half, unknown) == [FULL, HALF, Measured("zzz", refused="No.")]
    refused(lambda: measured(tmp_path, full, half | {name: value}), "was not written by this command", said)


def test_the_full_cache_is_not_refused(tmp_path):
    rows = [dataclasses.asdict(Measured("full", refused="No."))]
    refused(lambda: measured(tmp_path, *rows), "the full cache is refused")


# --- kvjax eval -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("live_bytes", 10**40), ("live_bytes", -1), ("allocated_bytes", -1), ("full_bytes", -1), ("retained", 7.5),
        ("retained", 0.0), ("policy", ""), ("policy", "x" * 5000), ("tokens", -1), ("prompt_tokens", -5),
        ("prompt_tokens", 0), ("read_tokens", -1), ("first_token", -1), ("read_seconds", math.nan),
        ("read_seconds", -1.0), ("decode_seconds", 1e308), ("finish_reason", "zzz"), ("finish_reason", "interrupted"),
    ],
)  # fmt: skip
def test_an_answer_of_eval_has_numbers_of_an_answer(name, value, tmp_path):
    path = tmp_path / "answers.jsonl"
    journal = suite_runs.journal_at(path)
    journal.add(suite_runs.answer(suite_runs.ITEMS[0]))
    journal.close()
    header, line = path.read_text().splitlines()
    path.write_text(f"{header}\n{json.dumps(json.loads(line) | {name: value})}\n")
    refused(lambda: suite_runs.journal_at(path), "line 2 is no line of a journal", name)


# --- kvjax compare --------------------------------------------------------------------------------------------------


def test_results_have_one_row_of_a_cache_and_one_of_the_full(tmp_path):
    path, settings = tmp_path / "results.json", results.Settings("m", "float32", ("niah_single_1",), 2)

    def read(*rows: results.Row) -> list[results.Row]:
        path.write_text(json.dumps(results.as_json(settings, rows, {}, [])))
        return results.read_rows(path, settings)

    full, half = results.Row(300, "full", None), results.Row(300, "lagkv", 0.5)
    assert read(full, half) == [full, half] and read() == []
    refused(lambda: read(full, half, half), "two rows")
    refused(lambda: read(full, full), "two rows")
    refused(lambda: read(half), "300 tokens have no row of the full cache")
    refused(lambda: read(full, half, dataclasses.replace(half, length=400)), "400 tokens have no row")
