"""Which rounds a strategy takes, and qAtt from masses: NumPy against NumPy, no model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounds_oracle import taken

import kvjax
from kvjax.policies import RoundAttention, format_policy, parse
from kvjax.policies.round_attention import STRATEGIES
from kvjax.rounds.selection import round_attention, select


@settings(max_examples=150, deadline=None)
@given(
    strategy=st.sampled_from(STRATEGIES),
    masses=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    top=st.sampled_from([0.1, 0.25, 0.3, 1.0]),
)
def test_every_strategy_takes_what_the_paper_says_and_at_least_one(strategy, masses, top):
    attention = np.array(masses, float)
    attention = attention / attention.sum() if attention.sum() else np.full(len(masses), 1 / len(masses))
    found = select(RoundAttention(strategy=strategy, top=top), attention)
    assert set(np.flatnonzero(found)) == taken(strategy, attention.tolist(), top, 0.1, 3.0)


def test_attention_is_summed_over_heads_of_unequal_slots_and_leaves_out_the_opening():
    mass = np.array([[5.0, 1, 2, 3, 0, 0], [5.0, 4, 0, 7, 1, 9]])
    start, end = np.array([[1, 1], [3, 2]]), np.array([[3, 2], [4, 5]])
    np.testing.assert_allclose(round_attention(mass, start, end), np.array([3 + 4, 3 + 8]) / 18)
    assert round_attention(0 * mass, start, end).tolist() == [0.5, 0.5]
    assert select(RoundAttention(), np.zeros(0)).shape == (0,)


@pytest.mark.parametrize("count", [7, 13, 22])
def test_rounds_that_differ_by_rounding_alone_are_equal(count):
    attention = np.full(count, 1 / count)
    assert (attention > attention.mean()).all()  # the mean of equal numbers is rounded below them
    found = select(RoundAttention("above_mean"), attention)
    assert np.flatnonzero(found).tolist() == [count - 1]


@pytest.mark.parametrize(
    "text, policy",
    [
        ("round", RoundAttention()),
        ("round:strategy=fixed,threshold=0.2", RoundAttention(strategy="fixed", threshold=0.2)),
        ("round:watershed=5,top=0.3,drop_after=4", RoundAttention(watershed=5, top=0.3, drop_after=4)),
        ("round:granularity=token,strategy=above_mean", RoundAttention("above_mean", "token")),
        ("round:inner=lagkv(ratio=0.5,lag=16)", RoundAttention(inner=kvjax.LagKV(ratio=0.5, lag=16))),
    ],
)
def test_text_and_back(text, policy):
    assert parse(text) == policy and parse(format_policy(policy)) == policy
    assert hash(parse(text)) == hash(policy)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"strategy": "best"}, "strategy"),
        ({"granularity": "head"}, "granularity"),
        ({"watershed": 0}, "at least 1"),
        ({"top": 0}, "top"),
        ({"threshold": 2}, "threshold"),
        ({"std": -1}, "std"),
        ({"drop_after": 0}, "drop_after"),
        ({"inner": "lagkv"}, "policy of tokens"),
        ({"inner": kvjax.H2O()}, "SlimKV"),
        ({"inner": RoundAttention()}, "cannot compress"),
        ({"inner": kvjax.RazorAttention(inner=kvjax.LagKV())}, "cannot compress"),
        ({"inner": kvjax.LagKV(), "granularity": "token"}, "leave inner out"),
        ({"profile": 3}, "profile"),
        ({"profile": "nowhere.yaml"}, "cannot be read"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, says):
    with pytest.raises(kvjax.UsageError, match=says) as error:
        RoundAttention(**options)
    assert "\n" not in str(error.value)


def test_another_policys_inner_it_is_not():
    with pytest.raises(kvjax.UsageError, match="policy of tokens"):
        kvjax.RazorAttention(inner=RoundAttention())
