"""Finch against its rule in NumPy: attention of the question's queries by their keys, whole or chunk by chunk."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choosing import ChoosingHead, assert_alone, assert_same, best

import kvjax
from kvjax.errors import UsageError
from kvjax.policies import CriticalKV, Finch
from kvjax.policies.finch import by_rank

W, BUDGET = 4, 14
BOUNDARIES = [1, W - 1, W, W + 1, BUDGET - 1, BUDGET, BUDGET + 1, 40, 70]


class FinchHead(ChoosingHead):
    """Each query's attention times the tokens up to it, summed, the mean over query heads; chunks share the budget."""

    def __init__(self, *args, chunk=None, **place):
        super().__init__(*args, **place)
        self.chunk = chunk

    def budget(self, total):
        return BUDGET

    def choose(self, candidates, new, budget):
        asked = new[-W:]
        prefix = len(candidates) - W
        scores = sum(self.mass(candidates, [t]) * (t + 1) for t in asked).mean(axis=0)[:prefix]
        if self.chunk is not None:
            scores = shares(scores, self.chunk)
        return [candidates[i] for i in best(scores, budget - W)] + candidates[prefix:]


def shares(scores, chunk):
    """Minus the share of each token's chunk that scores at least as high, itself and later equals included."""
    found = np.zeros(len(scores))
    for start in range(0, len(scores), chunk):
        part = scores[start : start + chunk]
        for rank, i in enumerate(sorted(range(len(part)), key=lambda i: (-part[i], -i)), 1):
            found[start + i] = -rank / len(part)
    return found


def head_of(chunk):
    return lambda *args, **place: FinchHead(*args, chunk=chunk, **place)


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (1, 4)], ids=["mha", "mqa"])
@pytest.mark.parametrize("chunk", [None, 9])
def test_choices_are_the_rule_around_every_boundary(heads, group, chunk):
    policy = Finch(budget=BUDGET, window=W, chunk=chunk)
    assert_same(policy, head_of(chunk), [("read", BOUNDARIES)], heads=heads, group=group)


@pytest.mark.parametrize("chunk", [None, 6])
def test_later_turns_choose_again_by_the_turns_own_queries(chunk):
    events = [("read", [30, 16, 5]), ("decode", 7), ("read", [9, 2, 0]), ("decode", 3), ("read", [1, 40, 20])]
    assert_same(Finch(budget=BUDGET, window=W, chunk=chunk), head_of(chunk), events, heads=2, group=2, seed=5)


def test_a_row_equals_the_row_alone():
    assert_alone(Finch(budget=BUDGET, window=W, chunk=7), [("read", [20, 70, 3]), ("decode", 4), ("read", [6, 1, 9])])


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=2, max_size=2),
    chunk=st.sampled_from([None, 2, 9, 100]),
    seed=st.integers(0, 10**6),
)
def test_any_lengths(lengths, chunk, seed):
    policy = Finch(budget=BUDGET, window=W, chunk=chunk)
    assert_same(policy, head_of(chunk), [("read", lengths)], heads=1, group=2, seed=seed)


@settings(max_examples=15, deadline=None)
@given(
    numbers=st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    chunk=st.integers(2, 12),
    skipped=st.sets(st.integers(0, 39)),
)
def test_equal_shares_of_all_chunks(numbers, chunk, skipped):
    """Of what counts, every chunk's k best are those with shares up to k / n, equals later first."""
    counted = np.array([i not in skipped for i in range(len(numbers))])
    found = np.asarray(by_rank(jnp.asarray(numbers, jnp.float32)[None, None], jnp.asarray(counted)[None, None], chunk))
    for start in range(0, len(numbers), chunk):
        part = [i for i in range(start, min(start + chunk, len(numbers))) if counted[i]]
        order = sorted(part, key=lambda i: (-numbers[i], -i))
        wanted = {i: np.float32(-rank) / np.float32(len(part)) for rank, i in enumerate(order, 1)}
        assert {i: found[0, 0, i] for i in part} == pytest.approx(wanted)


def test_a_chunk_that_holds_the_prefix_changes_nothing(tiny_model):
    given = dict(max_new_tokens=4, stop_token_ids=())
    prompt = list(range(3, 150))
    whole, one = (kvjax.generate(tiny_model, prompt, policy=f"finch:budget=60{x}", **given) for x in ("", ",chunk=999"))
    assert whole.tokens == one.tokens and whole.stats.retained == one.stats.retained


def test_it_scores_by_attention_only_without_chunks():
    CriticalKV(inner=Finch())
    with pytest.raises(UsageError, match="does not score by attention"):
        CriticalKV(inner=Finch(chunk=16))
    with pytest.raises(UsageError, match="chunk is 1"):
        Finch(chunk=1)
    with pytest.raises(UsageError, match="always keeps"):
        Finch(budget=32)
