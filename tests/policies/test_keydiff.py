"""KeyDiff against its definition in NumPy: minus the cosine to the mean of the normalised keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choosing import ChoosingHead, Lane, assert_alone, assert_same, best
from support.driver import config_for
from support.scorers import random_statistics

from kvjax.errors import UsageError
from kvjax.policies import KeyDiff

BUDGET = 10


class KeyDiffHead(ChoosingHead):
    anchors = None

    def budget(self, total: int) -> int:
        return BUDGET

    def choose(self, candidates, new, budget):
        keys = self.k[candidates]
        unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
        anchor = unit.mean(axis=0) if self.anchors is None else self.anchors[self.head]
        cosine = keys @ anchor / (np.linalg.norm(keys, axis=1) * np.linalg.norm(anchor))
        return [candidates[i] for i in best(-cosine, budget)]


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (2, 2), (1, 4)], ids=["mha", "gqa", "mqa"])
def test_choices_are_the_rule_around_every_boundary(heads, group):
    lengths = [1, BUDGET - 1, BUDGET, BUDGET + 1, 40, 70]
    assert_same(KeyDiff(budget=BUDGET), KeyDiffHead, [("read", lengths)], heads=heads, group=group)


def test_later_turns_choose_again_over_what_is_there():
    events = [("read", [30, 12, 5]), ("decode", 7), ("read", [9, 2, 0]), ("decode", 3), ("read", [1, 40, 20])]
    assert_same(KeyDiff(budget=BUDGET), KeyDiffHead, events, heads=2, group=2, seed=5)


@pytest.mark.parametrize(("heads", "group"), [(2, 2), (1, 4)], ids=["gqa", "mqa"])
def test_anchors_of_texts_are_every_layers_own_on_every_turn(heads, group):
    profile = random_statistics(config_for(heads, 4, 2, num_heads=heads * group))
    events = [("read", [2, BUDGET, 70]), ("decode", 5), ("read", [9, 2, 0])]
    for layer in (0, 1):
        head = type("Head", (KeyDiffHead,), {"anchors": profile.anchor(layer)})
        assert_same(
            KeyDiff(budget=BUDGET, profile=profile), head, events, heads=heads, group=group, layer=layer, layers=2
        )


@pytest.mark.parametrize("texts", [False, True], ids=["prompt", "texts"])
def test_a_row_equals_the_row_alone(texts):
    profile = random_statistics(config_for(2, 4, 1, num_heads=4)) if texts else None
    policy = KeyDiff(budget=BUDGET, profile=profile)
    assert_alone(policy, [("read", [20, 70, 3]), ("decode", 4), ("read", [6, 1, 9])])


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=2), seed=st.integers(0, 10**6))
def test_any_lengths(lengths, seed):
    assert_same(KeyDiff(budget=BUDGET), KeyDiffHead, [("read", lengths)], heads=1, group=2, seed=seed)


def test_the_odd_keys_stay_and_a_zero_key_is_no_trouble():
    lane = Lane(KeyDiff(budget=4), 1, 1, 1, 4, 60, seed=3)
    lane.k[:] = np.array([1, 2, 3, 4]) + 0.01 * lane.k
    lane.k[0, 0, [5, 17, 30]] *= -1
    lane.k[0, 0, 44] = 0
    assert lane.play([("read", [60])]).driver.kept(lane.k)[0] == [5, 17, 30, 44]


def test_the_length_of_a_key_does_not_count():
    plain, scaled = (Lane(KeyDiff(budget=BUDGET), 1, 2, 1, 4, 60, seed=3) for _ in range(2))
    scaled.k[:] *= 2.0 ** np.random.default_rng(0).integers(-3, 4, (1, 2, 60, 1))
    kept = [lane.play([("read", [60])]).driver.kept(lane.k) for lane in (plain, scaled)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("bad", [dict(budget=0), dict(budget=1.5), dict(ratio=-1), dict(budget=5, ratio=0.5)])
def test_bad_parameters_are_one_sentence(bad):
    with pytest.raises(UsageError) as error:
        KeyDiff(**bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
