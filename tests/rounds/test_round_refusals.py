"""Conversations of rounds that are refused: of other models, of other policies, and too large for the device."""

from __future__ import annotations

import pytest
import toys
from support.round_talks import BELOW, TURNS

import kvjax
from kvjax.policies import RoundAttention


@pytest.mark.parametrize(
    "policy, says",
    [
        ("round", "kvjax calibrate watershed"),
        ("round:watershed=4", "give 1 to 3"),
        ("round:watershed=2,inner=slimkv(budget=2)", "budget"),
    ],
)
def test_models_it_cannot_run_on(lm, policy, says):
    with pytest.raises(kvjax.UsageError, match=says):
        kvjax.generate(lm, "x", policy=policy)


def test_what_does_not_belong_together_is_refused(lm, one_of_ten, full):
    cache, other = one_of_ten[0][0].cache, full[0][0].cache
    for caches, says in (([cache, other], "cannot be one batch"), (cache, "1 rows and|policy")):
        with pytest.raises(kvjax.UsageError, match=says):
            kvjax.generate(lm, [[1], [2]], cache=caches, policy="full")
    with pytest.raises(kvjax.UsageError, match="another model"):
        kvjax.generate(toys.tiny_model(num_layers=5), [1], cache=cache)


@pytest.mark.parametrize("row", [1, -1, 0.5, True, "a", None])
def test_a_row_that_is_not_there_is_refused(one_of_ten, row):
    with pytest.raises(kvjax.UsageError, match=r"The conversation has no row .*; its rows are 0 to 0\.$"):
        one_of_ten[0][0].cache.row(row)


def test_rounds_too_large_for_the_device_are_refused_before_they_come(lm, one_of_ten, monkeypatch):
    cache = one_of_ten[0][0].cache
    monkeypatch.setattr("kvjax.rounds.turn.device_limit", lambda limit: 300_000)
    with pytest.raises(kvjax.DoesNotFit, match="rounds this question selects make"):
        kvjax.generate(lm, TURNS[1][0], cache=cache, logprobs=True)


def test_a_first_question_too_large_for_the_device_is_refused(lm, monkeypatch):
    monkeypatch.setattr("kvjax.rounds.turn.device_limit", lambda limit: 300_000)
    with pytest.raises(kvjax.DoesNotFit, match="first question, which is read with all layers"):
        kvjax.generate(lm, TURNS[0][0], policy=RoundAttention(watershed=BELOW))
