"""ChunkKV against its rule in NumPy: the best runs of neighbours by mean score, then a part of the next one."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choosing import ChoosingHead, Lane, assert_alone, assert_same

from kvjax.errors import UsageError
from kvjax.policies import NACL, TOVA, ChunkKV, KeyDiff, PyramidKV, SnapKV, format_policy, parse
from kvjax.policies.chunkkv import by_chunk

BUDGET, CHUNK = 10, 4


def keydiff_scores(keys: np.ndarray) -> np.ndarray:
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    anchor = unit.mean(axis=0)
    return -unit @ anchor / np.linalg.norm(anchor)


def by_runs(scores: np.ndarray, budget: int, chunk: int) -> list[int]:
    """Places that stay: whole runs from the best down, then the best places of the first that does not fit."""
    starts = range(0, len(scores), chunk)
    best = sorted(starts, key=lambda s: (scores[s : s + chunk].mean(), s), reverse=True)
    kept: list[int] = []
    for start in best:
        places = range(start, min(start + chunk, len(scores)))
        kept += sorted(places, key=lambda i: (scores[i], i), reverse=True)[: budget - len(kept)]
    return sorted(kept)


class ChunkHead(ChoosingHead):
    """A head that chooses by itself."""

    def budget(self, total: int) -> int:
        return BUDGET

    def choose(self, candidates, new, budget):
        return [candidates[i] for i in by_runs(keydiff_scores(self.k[candidates]), budget, CHUNK)]


APART = ChunkKV(budget=BUDGET, chunk=CHUNK, together=False)
TOGETHER = ChunkKV(budget=BUDGET, chunk=CHUNK)


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (2, 2), (1, 4)], ids=["mha", "gqa", "mqa"])
def test_choices_are_the_rule_around_every_boundary(heads, group):
    lengths = [1, BUDGET - 1, BUDGET, BUDGET + 1, 40, 70]
    assert_same(APART, ChunkHead, [("read", lengths)], heads=heads, group=group)


def test_later_turns_cut_anew_what_is_there():
    events = [("read", [30, 12, 5]), ("decode", 7), ("read", [9, 2, 0]), ("decode", 3), ("read", [1, 40, 20])]
    assert_same(APART, ChunkHead, events, heads=2, group=2, seed=5)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=2), seed=st.integers(0, 10**6))
def test_any_lengths(lengths, seed):
    assert_same(APART, ChunkHead, [("read", lengths)], heads=1, group=2, seed=seed)


def test_together_all_heads_keep_what_their_mean_score_says():
    lane = Lane(TOGETHER, 2, 3, 1, 4, 60, seed=3).play([("read", [60, 33])])
    for row, length in enumerate((60, 33)):
        scores = np.mean([keydiff_scores(lane.k[row, head, :length].astype(np.float64)) for head in range(3)], axis=0)
        assert lane.driver.kept(lane.k, row) == [by_runs(scores, BUDGET, CHUNK)] * 3


@pytest.mark.parametrize("policy", [TOGETHER, APART])
def test_a_row_equals_the_row_alone(policy):
    assert_alone(policy, [("read", [20, 70, 3]), ("decode", 4), ("read", [6, 1, 9])])


def test_what_the_inner_policy_protects_stays():
    policy = ChunkKV(budget=BUDGET, chunk=CHUNK, inner=SnapKV(window=3, kernel=1))
    lane = Lane(policy, 1, 2, 2, 4, 60, seed=1).play([("read", [60])])
    for kept in lane.driver.kept(lane.k):
        assert kept[-3:] == [57, 58, 59] and len(kept) == BUDGET
        # One whole run, and a part of another.
        runs = [place // CHUNK for place in kept[:-3]]
        assert max(runs.count(run) for run in runs) == CHUNK


def test_budgets_are_the_inner_policys_by_layer():
    pyramid = PyramidKV(budget=30, window=4, beta=4)
    policy = ChunkKV(budget=30, inner=PyramidKV(window=4, beta=4))
    lane = Lane(policy, 1, 1, 2, 4, 90, seed=1, layer=2, layers=3)
    config, total = lane.driver.config, np.array([90], np.int32)
    assert [policy.budgets(config, i, total).tolist() for i in range(3)] == [
        pyramid.budgets(config, i, total).tolist() for i in range(3)
    ]
    kept = lane.play([("read", [90])]).driver.kept(lane.k)
    assert len(kept[0]) == pyramid.budgets(config, 2, total)[0, 0]


def test_marks_and_draws_of_the_inner_policy_are_there():
    policy = ChunkKV(budget=20, chunk=CHUNK, inner=NACL())
    lane = Lane(policy, 1, 1, 2, 4, 80, seed=1).play([("read", [60]), ("read", [9])])
    assert policy.marks == ("position",) and len(lane.driver.kept(lane.k)[0]) == 20


def test_ties_go_to_the_later_chunk_and_token():
    scores, counted = jnp.zeros((1, 1, 10)), jnp.ones((1, 1, 10), bool)
    assert np.asarray(by_chunk(scores, counted, 4))[0, 0].tolist() == list(range(10))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(chunk=1), "chunk"),
        (dict(together=1), "together"),
        (dict(inner=TOVA()), "score of each token"),
        (dict(inner=KeyDiff(ratio=0.5)), "leave budget"),
        (dict(inner=KeyDiff(keep_turn=3)), "leave budget"),
        (dict(ratio=0.5, budget=3), "takes one of"),
        (dict(inner=SnapKV(), budget=8), "smaller than"),
    ],
)
def test_bad_parameters_are_one_sentence(options, says):
    with pytest.raises(UsageError, match=says) as error:
        ChunkKV(**options)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_text_and_back():
    policy = ChunkKV(ratio=0.25, inner=SnapKV(window=16, kernel=1))
    assert parse("chunkkv:ratio=0.25,inner=snapkv(window=16,kernel=1)") == policy == parse(format_policy(policy))
    assert format_policy(ChunkKV(ratio=0.25)) == "chunkkv:ratio=0.25"
