"""NACL against its rule in NumPy, given the draws; and that the draws are what they claim to be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choosing import ChoosingHead, Lane, assert_alone, assert_same, best, softmax

from kvjax.errors import UsageError
from kvjax.policies import NACL

BUDGET, SINK = 20, 2


class NaclHead(ChoosingHead):
    """12 : 7 : 1 of the budget: best by proxy score, drawn from the others, protected ends (one recent at least)."""

    layer, seed, proxy, random, protect = 0, 0, 0.1, 0.35, 0.05

    def budget(self, total: int) -> int:
        return BUDGET

    def luck(self, tokens: list[int]) -> np.ndarray:
        """The Gumbel numbers of these tokens, each from the identity of a token alone."""
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), self.layer), self.head)
        return np.array([jax.random.gumbel(jax.random.fold_in(key, t)) for t in tokens], np.float64)

    def choose(self, candidates, new, budget):
        protected = max(int(budget * self.protect + 1e-9), SINK + 1)
        drawn = min(int(budget * self.random + 1e-9), budget - protected)
        ends = candidates[:SINK] + candidates[len(candidates) - (protected - SINK) :]
        proxies = new[-int(np.ceil(self.proxy * self.seen - 1e-3)) :]
        score = dict(zip(candidates, self.mass(candidates, proxies).mean(axis=0), strict=True))
        middle = [t for t in candidates if t not in ends]
        top = [middle[i] for i in best([score[t] for t in middle], budget - protected - drawn)]
        rest = [t for t in middle if t not in top]
        lucky = [rest[i] for i in best(np.array([score[t] for t in rest]) + self.luck(rest), drawn)]
        return sorted(ends + top + lucky)


def policy(**changes):
    return NACL(**{"budget": BUDGET, "sink": SINK, "proxy": 0.1, **changes})


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (2, 2), (1, 3)], ids=["mha", "gqa", "mqa"])
def test_choices_are_the_rule_around_every_boundary(heads, group):
    assert_same(policy(), NaclHead, [("read", [1, 19, 20, 21, 40, 70])], heads=heads, group=group)


def test_later_turns_choose_again_over_what_is_there():
    events = [("read", [30, 12, 5]), ("decode", 7), ("read", [9, 2, 0]), ("decode", 3), ("read", [1, 40, 20])]
    assert_same(policy(), NaclHead, events, heads=2, group=2, seed=5)


@pytest.mark.parametrize("random", [0.0, 0.95])
def test_from_no_draw_to_nothing_but_draws(random):
    class Head(NaclHead):
        pass

    Head.random = random
    assert_same(policy(random=random), Head, [("read", [70, 25])], heads=1, group=2)


def test_a_row_equals_the_row_alone():
    assert_alone(policy(), [("read", [30, 70, 3]), ("decode", 4), ("read", [6, 1, 9])])


def test_a_tokens_luck_is_its_own():
    """The same token draws the same number in any row, slot, and batch; other seeds, layers and heads differ."""
    position = jnp.array([[[0, 5, 9, 12], [5, 5, 0, 1]], [[12, 9, 5, 0], [1, 0, 5, 5]]])
    draws = np.asarray(policy().draws(3, position))
    np.testing.assert_array_equal(draws[0, :, ::-1], draws[1])
    assert draws[0, 1, 0] == draws[0, 1, 1] != draws[0, 0, 1]
    assert (draws != np.asarray(policy(seed=1).draws(3, position))).all()
    assert (draws != np.asarray(policy().draws(4, position))).all()


def test_draws_follow_the_softmax_of_the_scores():
    """One of four tokens is drawn per head: how often each is, over many heads, is its softmax probability."""
    chooser = NACL(budget=3, sink=1, random=0.34, protect=0.66, seed=7)
    score = np.array([0.0, 1.0, 2.0, 0.5])
    heads = 4000
    luck = chooser.draws(0, jnp.broadcast_to(jnp.arange(4), (1, heads, 4)))[0]
    drawn = np.bincount(np.argmax(score + np.asarray(luck), axis=1), minlength=4) / heads
    expected = softmax(score)
    assert (np.abs(drawn - expected) < 4 * np.sqrt(expected * (1 - expected) / heads)).all(), (drawn, expected)


def test_seeds_change_what_is_drawn_and_nothing_else():
    def kept(seed: int, random: float) -> list[list[int]]:
        lane = Lane(policy(seed=seed, random=random), 1, 2, 2, 4, 60, seed=1)
        return lane.play([("read", [60])]).driver.kept(lane.k)

    assert kept(0, 0.35) == kept(0, 0.35) != kept(1, 0.35)
    assert kept(0, 0.0) == kept(1, 0.0)


@settings(max_examples=100, deadline=None)
@given(
    budget=st.integers(0, 500).map(lambda n: n + 18),
    random=st.floats(0, 0.9),
    protect=st.floats(0, 0.1),
    sink=st.integers(0, 16),
)
def test_shares_fill_the_budget(budget, random, protect, sink):
    best_of, drawn, protected = (
        int(x[0]) for x in NACL(budget=budget, random=random, protect=protect, sink=sink).parts(jnp.array([budget]))
    )
    assert best_of + drawn + protected == budget
    assert best_of >= 0 and drawn >= 0 and protected > sink


def test_the_originals_shares():
    """20 % of 10,000 tokens: 1,200 by score, 700 drawn, 100 protected."""
    assert NACL().ratio == 0.2
    assert [int(x[0]) for x in NACL().parts(jnp.array([2000]))] == [1200, 700, 100]


@pytest.mark.parametrize(
    "bad",
    [dict(proxy=0), dict(proxy=2), dict(random=-0.1), dict(random=0.97), dict(protect="all"), dict(sink=-1),
     dict(seed=-1), dict(seed=0.5), dict(group="first"), dict(budget=5), dict(budget=100, ratio=0.1)],
)  # fmt: skip
def test_bad_parameters_are_one_sentence(bad):
    with pytest.raises(UsageError) as error:
        NACL(**bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
