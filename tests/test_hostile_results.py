"""Results that a run goes on from, changed by hand: numbers that no run writes are refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from kvjax.errors import KvjaxError
from kvjax.eval import round_questions


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
