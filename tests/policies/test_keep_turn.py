"""The last tokens of a later turn stay where that is asked, against the rule in NumPy, in policies of every kind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.test_keydiff import BUDGET, KeyDiffHead
from support.choosing import Lane, assert_alone, assert_same, best

from kvjax.errors import UsageError
from kvjax.policies import H2O, TOVA, ChunkKV, KeyDiff, LagKV, SnapKV

TURN = 4
#: Longer than half of the budget, where the half counts.
LONG = 40


def kept_turn(turn: int):
    """KeyDiff's oracle with the last ``turn`` tokens of a later turn kept, as far as half of the budget goes."""

    class Head(KeyDiffHead):
        def choose(self, candidates, new, budget):
            count = min(turn, len(new), budget // 2) if len(candidates) > len(new) else 0
            keys = self.k[candidates]
            unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
            scores = -unit @ unit.mean(axis=0)
            scores[len(candidates) - count :] = np.inf
            return [
                candidates[i] for i in best(np.where(np.isinf(scores), 1e9 + np.arange(len(scores)), scores), budget)
            ]

    return Head


EVENTS = [("read", [30, 12, 5]), ("decode", 7), ("read", [9, 2, 0]), ("decode", 3), ("read", [1, 40, 20])]


@pytest.mark.parametrize("turn", [TURN, LONG])
def test_the_last_tokens_of_a_later_turn_stay(turn):
    assert_same(KeyDiff(budget=BUDGET, keep_turn=turn), kept_turn(turn), EVENTS, heads=2, group=2, seed=5)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(first=st.integers(0, 64), later=st.integers(1, 30), turn=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_any_lengths(first, later, turn, seed):
    events = [("read", [first, 9]), ("read", [later, 5])]
    assert_same(KeyDiff(budget=BUDGET, keep_turn=turn), kept_turn(turn), events, heads=1, group=2, seed=seed)


@pytest.mark.parametrize(
    "policy", [SnapKV(budget=20, window=2), H2O(budget=20), TOVA(budget=20), ChunkKV(budget=20, chunk=4)],
    ids=lambda policy: type(policy).__name__,
)  # fmt: skip
def test_every_kind_of_policy_keeps_its_size_and_the_turn(policy):
    policy = dataclasses.replace(policy, keep_turn=8)
    lane = Lane(policy, 2, 2, 2, 4, 80, seed=2).play([("read", [50, 44]), ("read", [8, 12])])
    for row, seen in enumerate((58, 56)):
        for kept in lane.driver.kept(lane.k, row):
            assert len(kept) == 20 and set(range(seen - 8, seen)) <= set(kept)
    assert_alone(policy, [("read", [20, 70, 3]), ("decode", 4), ("read", [6, 1, 9])])


def test_a_first_prompt_is_no_later_turn():
    plain, kept = (Lane(KeyDiff(budget=BUDGET, keep_turn=n), 1, 1, 1, 4, 60, seed=3) for n in (0, TURN))
    assert plain.play([("read", [60])]).driver.kept(plain.k) == kept.play([("read", [60])]).driver.kept(kept.k)


@pytest.mark.parametrize("bad", [-1, 1.5, "all"])
def test_a_bad_number_is_one_sentence(bad):
    with pytest.raises(UsageError, match="keep_turn"):
        KeyDiff(keep_turn=bad)
    with pytest.raises(TypeError):
        LagKV(keep_turn=4)  # type: ignore[call-arg]
