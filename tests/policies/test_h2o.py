"""H2O against a NumPy oracle, token by token, and its properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.eviction_oracle import NARROW, HeadOracle, RowOracle, attention, sizes
from support.evictor import ROOM, Evictor, compare, layer_config, random_qkv

from kvjax.errors import UsageError
from kvjax.policies import H2O

# --- the oracle: accumulated attention [Zhang et al., 4.2], heavy hitters and recent tokens as in the official code ---


def accumulate(oracle: HeadOracle, candidates: list[int], new: list[int]) -> tuple[dict, dict]:
    """Column sums of the attention of all the new queries, added to what kept tokens had."""
    weights = attention(oracle.q, oracle.k, new, candidates, oracle.q.shape[-1] ** -0.5).sum(axis=(0, 1))
    scores = {t: oracle.scores.get(t, 0.0) + weight for t, weight in zip(candidates, weights, strict=True)}
    return scores, scores


def oracle_of(policy: H2O):
    def recent(budget: int) -> int:
        return budget // 2 if policy.recent is None else policy.recent

    def make(q, k, v):
        return RowOracle([HeadOracle(*x, sizes(policy), recent, accumulate) for x in zip(q, k, v, strict=True)])

    return make


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (2, 3), (1, 4)], ids=["mha", "gqa", "mqa"])
def test_prompt_and_every_step_keep_what_the_oracle_keeps(heads, group):
    policy, budget = H2O(budget=12), 12
    lengths = [1, budget - 1, budget, budget + 1, 40]
    events = [("steps", 1), ("steps", 1), ("steps", 30)]
    assert compare(policy, oracle_of(policy), lengths, events, seed=0, heads=heads, group=group) > NARROW


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=2),
    policy=st.sampled_from([H2O(ratio=0.3), H2O(budget=9, recent=0), H2O(budget=9, recent=8), H2O(budget=2)]),
    seed=st.integers(0, 10**6),
)
def test_any_lengths_sizes_and_windows(lengths, policy, seed):
    assume(compare(policy, oracle_of(policy), lengths, [("steps", 20)], seed=seed) > NARROW)


@pytest.mark.parametrize("policy", [H2O(budget=10), H2O(ratio=0.4, recent=3)])
def test_later_turns_select_over_what_was_kept_decoded_and_new(policy):
    events = [("steps", 9), ("turn", 1), ("steps", 2), ("turn", 25), ("steps", 9)]
    assert compare(policy, oracle_of(policy), [30, 4], events, seed=5) > NARROW


def test_half_of_the_budget_is_recent_unless_said_otherwise():
    q, k, v = random_qkv(6, 1, 1, 1, 60, 8)
    q, k[..., 40:, :] = np.abs(q) + 0.1, k[..., 40:, :] - 50  # nobody attends to the last 20 tokens
    for policy, recent in ((H2O(budget=16), 8), (H2O(budget=17), 8), (H2O(budget=16, recent=3), 3)):
        kept = Evictor(policy, layer_config(1, 1, 8), 1, ROOM).turn(q, k, v, 60).kept(k)[0]
        assert len(kept) == policy.budget and sum(t >= 40 for t in kept) == recent


def test_a_long_row_never_loses_its_heaviest_hitter():
    q, k, v = random_qkv(7, 1, 1, 1, 128, 8)
    q, k[..., 5, :] = np.abs(q), 20.0  # every query points at token 5
    evictor = Evictor(H2O(budget=4), layer_config(1, 1, 8), 1, ROOM)
    evictor.turn(q[..., :64, :], k[..., :64, :], v[..., :64, :], 64)
    evictor.steps(q[..., 64:, :], k[..., 64:, :], v[..., 64:, :])
    assert 5 in evictor.kept(k)[0] and {126, 127} < set(evictor.kept(k)[0])


@pytest.mark.parametrize(
    "bad", [dict(budget=1), dict(recent=-1), dict(recent=2.5), dict(budget=8, recent=8), dict(ratio=0), dict(ratio=1.5),
            dict(budget=64, ratio=0.5), dict(budget="many"), dict(ratio=float("nan"))],
)  # fmt: skip
def test_bad_parameters_are_one_sentence(bad):
    with pytest.raises(UsageError) as error:
        H2O(**bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
