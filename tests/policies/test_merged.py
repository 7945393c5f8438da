"""Merged against its equation in NumPy, one head and one token at a time, and what merging never does."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.test_adaptive import keydiff_scores
from support.choosing import ChoosingHead, Lane, best

import kvjax
from kvjax.cache.pool import keys_and_values
from kvjax.errors import UsageError
from kvjax.policies import TOVA, AdaptiveHeads, ChunkKV, Compactor, KeyDiff, Merged, SnapKV, format_policy, parse

BUDGET = 10


class MergedHead(ChoosingHead):
    """KeyDiff's choice; the values of what leaves go to the most similar key that stays."""

    def __init__(self, *args, threshold, **place):
        super().__init__(*args, **place)
        self.threshold, self.values = threshold, {}

    def budget(self, total):
        return BUDGET

    def read(self, count):
        self.values |= {t: self.v[t] for t in range(self.seen, self.seen + count)}
        super().read(count)

    def decode(self, count):
        self.values |= {t: self.v[t] for t in range(self.seen, self.seen + count)}
        super().decode(count)

    def choose(self, candidates, new, budget):
        kept = [candidates[i] for i in best(keydiff_scores(self.k[candidates]), budget)]
        unit = self.k / np.linalg.norm(self.k, axis=-1, keepdims=True)
        sums, weights = dict.fromkeys(kept, 0.0), dict.fromkeys(kept, 0.0)
        for e in sorted(set(candidates) - set(kept)):
            similar = [unit[e] @ unit[t] for t in kept]
            t, s = kept[int(np.argmax(similar))], max(similar)
            if s >= self.threshold:
                mine, other = (np.linalg.norm(self.values[x]) for x in (e, t))
                w = s * mine / (mine + other)
                sums[t], weights[t] = sums[t] + w * self.values[e], weights[t] + w
        self.values |= {t: (self.values[t] + sums[t]) / (1 + weights[t]) for t in kept}
        return kept


def assert_as_equation(events, *, threshold=0.0, heads=2, seed=0):
    batch = len(next(amount for kind, amount in events if kind == "read"))
    tokens = sum(int(max(amount)) if kind == "read" else amount for kind, amount in events)
    policy = Merged(budget=BUDGET, threshold=threshold)
    lane = Lane(policy, batch, heads, 2, 4, tokens, seed).play(events)
    values = np.asarray(keys_and_values(lane.driver.cache)[1])
    for row in range(batch):
        kept = lane.driver.kept(lane.k, row)
        for head in range(heads):
            oracle = MergedHead(lane.q[row, head], lane.k[row, head], lane.v[row, head], threshold=threshold)
            for kind, amount in events:
                oracle.read(int(amount[row])) if kind == "read" else oracle.decode(amount)
            assert kept[head] == oracle.kept, (row, head)
            wanted = np.array([oracle.values[t] for t in oracle.kept])
            np.testing.assert_allclose(values[row, head, : len(wanted)], wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("threshold", [0.0, 0.7])
def test_values_are_the_equations_around_every_boundary(threshold):
    assert_as_equation([("read", [1, BUDGET - 1, BUDGET, BUDGET + 1, 40, 150])], threshold=threshold)


def test_later_turns_merge_into_what_was_merged():
    events = [("read", [30, 12, 5]), ("decode", 7), ("read", [9, 2, 0]), ("decode", 3), ("read", [1, 40, 20])]
    assert_as_equation(events, seed=5)


@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=2), seed=st.integers(0, 10**6))
def test_any_lengths(lengths, seed):
    assert_as_equation([("read", lengths)], heads=1, seed=seed)


def lane_of(policy, seed=3, v=None):
    lane = Lane(policy, 2, 3, 2, 4, 101, seed)
    lane.v = lane.v if v is None else v(lane.v)
    return lane.play([("read", [90, 31]), ("decode", 3), ("read", [4, 8])])


@pytest.mark.parametrize(
    "inner", [KeyDiff(), SnapKV(window=3), AdaptiveHeads(inner=KeyDiff()), ChunkKV(chunk=4)], ids=type
)
def test_it_keeps_the_inner_policys_keys_in_as_many_bytes(inner):
    """Values stay within those that there were, and equal ones stay as they are."""
    merged = lane_of(Merged(budget=BUDGET, inner=inner))
    alone = lane_of(dataclasses.replace(inner, budget=BUDGET))
    assert [merged.driver.kept(merged.k, row) for row in range(2)] == [
        alone.driver.kept(alone.k, row) for row in (0, 1)
    ]
    sizes = [[x.nbytes for x in jax.tree.leaves(lane.driver.cache)] for lane in (merged, alone)]
    assert sizes[0] == sizes[1]
    held = np.asarray(keys_and_values(merged.driver.cache)[1])
    for row, head in np.ndindex(2, 3):
        own, length = merged.v[row, head], int(merged.driver.cache.length[row, head])
        assert (held[row, head, :length] <= own.max(axis=0) + 1e-5).all()
        assert (held[row, head, :length] >= own.min(axis=0) - 1e-5).all()
        assert (
            held[row, head, :length] != np.asarray(keys_and_values(alone.driver.cache)[1])[row, head, :length]
        ).any()
    same = lane_of(Merged(budget=BUDGET, inner=inner), v=lambda v: 0 * v + np.arange(1, 5, dtype=np.float32))
    held, length = np.asarray(keys_and_values(same.driver.cache)[1]), np.asarray(same.driver.cache.length)
    np.testing.assert_allclose(held[np.arange(held.shape[2]) < length[..., None]] - np.arange(1, 5), 0, atol=1e-5)


def test_a_threshold_that_nothing_reaches_is_the_inner_policy():
    merged, alone = lane_of(Merged(budget=BUDGET, threshold=1.0)), lane_of(KeyDiff(budget=BUDGET))
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(values_of, (merged, alone)), strict=True))


def values_of(lane):
    return keys_and_values(lane.driver.cache)


def test_a_row_equals_the_row_alone():
    policy = Merged(budget=BUDGET)
    both = Lane(policy, 2, 2, 2, 4, 80, seed=1).play([("read", [80, 33])])
    alone = Lane(policy, 1, 2, 2, 4, 80, seed=1)
    alone.k, alone.v, alone.q = both.k[1:], both.v[1:], both.q[1:]
    alone.play([("read", [33])])
    for a, b in zip(values_of(both), values_of(alone), strict=True):
        np.testing.assert_array_equal(a[1], b[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "storage"),
    [("merged", "int8"), ("merged:inner=adaptive(inner=keydiff)", "int8"), ("razor:heads=0.1,inner=merged", "model")],
)
def test_it_runs_over_turns_in_either_storage(policy, storage):
    lm, prompt = toys.tiny_model(), [i * i % 97 for i in range(150)]
    policy = f"{policy}{',' if ':' in policy else ':'}ratio={0.25 if policy[0] == 'm' else 0.5}"
    first = kvjax.generate(lm, [prompt, prompt[:40]], policy=policy, storage=storage, max_new_tokens=6)
    again = kvjax.generate(lm, prompt[:30], cache=first[0].cache, max_new_tokens=6)
    alone = kvjax.generate(lm, prompt[:40], policy=policy, storage=storage, max_new_tokens=6)
    assert first[1].tokens == alone.tokens and len(again.tokens)
    assert parse(format_policy(parse(policy))) == parse(policy)


def test_what_it_cannot_be_over_is_one_sentence():
    for inner in (TOVA(), Merged(), kvjax.Full()):
        with pytest.raises(UsageError, match="does not choose once, by a score of each token; give Merged"):
            Merged(inner=inner)
    with pytest.raises(UsageError, match="threshold is 2"):
        Merged(threshold=2)
    with pytest.raises(UsageError, match="leave budget"):
        Merged(inner=Compactor(budget=99))
    with pytest.raises(UsageError, match="does not choose once"):
        ChunkKV(inner=Merged())
