"""CriticalKV's two stages against an oracle in NumPy, and the norms that a layer hands over."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.test_kvzip import KVzipHead
from support.choosing import assert_alone, assert_same, best

import kvjax
from kvjax.errors import UsageError
from kvjax.policies import AdaptiveHeads, Compactor, CriticalKV, KeyDiff, KVzip, SnapKV

BUDGET, SINK = 12, 3
CHOSEN = CriticalKV(budget=BUDGET, inner=KVzip(sink=SINK))


class CriticalHead(KVzipHead):
    """Over KVzip's scores: half of the budget by these, half by these times the norm."""

    first, epsilon = 0.5, 1e-4

    def __init__(self, *args, first=0.5, **place):
        super().__init__(*args, **place)
        self.norms: dict[int, float] = {}
        self.first = first

    def noted(self, new):
        super().noted(new)
        self.norms |= {t: np.mean([abs(q[t, 1]) + 0.1 for q in self.q]) for t in new}  # as support/dense.py says

    def choose(self, candidates, new, budget):
        average = np.mean([self.found[t] for t in candidates if t in self.found])
        scores = np.array([self.found.get(t, average) for t in candidates])[SINK:]
        usual = np.mean([self.norms[t] for t in candidates if t in self.norms])
        norms = np.array([self.norms.get(t, usual) for t in candidates])[SINK:]
        one = best(scores, max(int(self.first * budget) - SINK, 0))
        rest = [i for i in range(len(scores)) if i not in one]
        weighed = ((scores + self.epsilon) * norms)[rest]
        two = [rest[i] for i in best(weighed, budget - SINK - len(one))]
        return candidates[:SINK] + [candidates[SINK + i] for i in sorted([*one, *two])]


@pytest.mark.parametrize("first", [0.0, 0.5, 1.0])
def test_both_stages_choose_as_the_algorithm(first):
    policy = CriticalKV(budget=BUDGET, inner=KVzip(sink=SINK), first=first)
    lengths = [1, SINK, BUDGET, BUDGET + 1, 70]
    assert_same(policy, lambda *x, **y: CriticalHead(*x, first=first, **y), [("read", lengths)], heads=2, group=2)


def test_later_turns_keep_the_norms_and_give_decoded_tokens_the_average():
    events = [("read", [30, 14, 5]), ("decode", 7), ("read", [9, 2, 0]), ("decode", 3), ("read", [1, 40, 20])]
    assert_same(CHOSEN, CriticalHead, events, heads=2, group=2, seed=5)


def test_a_row_equals_the_row_alone():
    assert_alone(CHOSEN, [("read", [20, 70, 3]), ("decode", 4), ("read", [6, 1, 9])])


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=2), seed=st.integers(0, 10**6))
def test_any_lengths(lengths, seed):
    assert_same(CHOSEN, CriticalHead, [("read", lengths)], heads=1, group=2, seed=seed)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_norms_are_those_of_the_products_with_the_output_projection(weights):
    lm = toys.tiny_model(weights=weights)
    layer, c = lm.params.layers[0], lm.config
    v = np.random.default_rng(0).standard_normal((2, c.num_kv_heads, 24, c.head_dim)).astype(np.float32)
    found = np.asarray(layer.output_norms(jnp.asarray(v)))
    # A head's part alone through the projection, which is linear.
    eye = np.eye(c.num_heads * c.head_dim, dtype=np.float32)
    stored = layer.out[...]
    rows = np.asarray(stored) if weights is None else np.asarray(stored.values * stored.scale[:, None]).T
    rows = (eye @ rows).reshape(c.num_kv_heads, c.group_size, c.head_dim, -1)
    wanted = np.abs(np.einsum("bhtd,hgdm->bhgtm", v, rows)).sum(axis=-1)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_under_one_budget_for_all_heads_what_is_chosen_first_stays(scope):
    """Its numbers are of one head: those of a head with large products would push the others' first choices out."""
    lm = toys.tiny_model(num_heads=4, num_kv_heads=4)
    for layer in lm.params.layers:
        layer.out[...] = layer.out[...].at[: lm.config.head_dim].multiply(30.0)  # of the first head
    policy = AdaptiveHeads(budget=40, inner=CriticalKV(inner=SnapKV(window=8)), scope=scope, floor=0.0)
    output = kvjax.generate(
        lm, np.random.default_rng(0).integers(3, 250, 200).tolist(), policy=policy, max_new_tokens=0
    )
    kept = np.array(output.stats.retained)
    assert kept.sum() == 40 * kept.size and kept.min() >= 20 and kept[:, 0].min() > 60


@pytest.mark.slow
def test_it_runs_over_any_policy_of_attention_and_refuses_others():
    lm = toys.tiny_model()
    for inner in ("expected_attention(future=8)", "kvzip", "pyramidkv(window=4)"):
        output = kvjax.generate(lm, "abc " * 30, policy=f"criticalkv:budget=24,inner={inner}", max_new_tokens=1)
        assert np.mean(output.stats.retained) == 24
    for inner in (KeyDiff(), Compactor()):
        with pytest.raises(UsageError, match="does not score by attention"):
            CriticalKV(inner=inner)
    with pytest.raises(UsageError, match="first"):
        CriticalKV(first=1.5)
    with pytest.raises(UsageError, match="cannot compress a finished round"):
        kvjax.RoundAttention(inner=CriticalKV(budget=64))


@pytest.mark.parametrize("inner", [kvjax.H2O(), kvjax.LagKV(), "snapkv"], ids=["h2o", "lagkv", "text"])
def test_what_is_proposed_instead_is_not_refused_in_turn(inner):
    with pytest.raises(UsageError, match=r"such as (kvjax\.)?SnapKV"):
        CriticalKV(inner=inner)
