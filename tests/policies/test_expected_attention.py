"""ExpectedAttention against its equations in NumPy, with rotation matrices written out, and against sampled queries."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choosing import ChoosingHead, Lane, assert_alone, assert_same, best, softmax
from support.driver import config_for
from support.scorers import random_statistics

from kvjax.errors import UsageError
from kvjax.model.config import RopeConfig
from kvjax.policies.expected_attention import ExpectedAttention, expected_logits, rotate_ahead

BUDGET, SINK, FUTURE, DIM = 10, 2, 16, 4
THETA = 10000.0


def rotation(position: float, dim: int, scale: float = 1.0) -> np.ndarray:
    """The rotary matrix of a position: channels i and i + dim / 2 rotate by position x theta^(-2i / dim)."""
    matrix = np.zeros((dim, dim))
    half = dim // 2
    for i in range(half):
        angle = position * THETA ** (-2 * i / dim)
        matrix[i, i] = matrix[i + half, i + half] = scale * np.cos(angle)
        matrix[i, i + half], matrix[i + half, i] = -scale * np.sin(angle), scale * np.sin(angle)
    return matrix


class ExpectedHead(ChoosingHead):
    def __init__(self, *args, covariance=True, values=True, epsilon=0.01, scale=1.0, slopes=None, texts=None, **place):
        super().__init__(*args, **place)
        self.covariance, self.values, self.epsilon = covariance, values, epsilon
        self.scale, self.slopes, self.texts = scale, slopes, texts
        self.asked: list[int] = []

    def budget(self, total: int) -> int:
        return BUDGET

    def noted(self, new):
        self.asked += [t for t in new if t >= SINK]

    def choose(self, candidates, new, budget):
        sinks, rest = candidates[:SINK], candidates[SINK:]
        dim = self.k.shape[1]
        ahead = np.mean([rotation(self.seen + j, dim, self.scale) for j in range(FUTURE)], axis=0)
        if self.slopes is not None:
            ahead = np.eye(dim)
        weights = []
        for g, q in enumerate(self.q):
            if self.texts is None:
                mean, spread = q[self.asked].mean(axis=0), np.cov(q[self.asked].T, ddof=0)
            else:
                mean, spread = (np.float64(x[self.head, g]) for x in self.texts)
            mean, spread = ahead @ mean, ahead @ spread @ ahead.T
            logits = self.k[rest] @ mean / np.sqrt(dim)
            if self.covariance:
                logits = logits + np.array([key @ spread @ key for key in self.k[rest]]) / (2 * dim)
            if self.slopes is not None:
                logits = logits + self.slopes[self.head][g] * np.array([t - self.seen for t in rest])
            weights.append(softmax(logits))
        scores = np.mean(weights, axis=0)
        if self.values:
            scores = (scores + self.epsilon) * np.linalg.norm(self.v[rest], axis=1)
        return sinks + [rest[i] for i in best(scores, budget - SINK)]


def head_of(**options):
    return lambda *args, **place: ExpectedHead(*args, **options, **place)


def policy(**options):
    return ExpectedAttention(**{"budget": BUDGET, "sink": SINK, "future": FUTURE, **options})


BOUNDARIES = [1, SINK, SINK + 1, BUDGET - 1, BUDGET, BUDGET + 1, 40, 70]


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (2, 2), (1, 4)], ids=["mha", "gqa", "mqa"])
def test_choices_are_the_equations_around_every_boundary(heads, group):
    assert_same(policy(), head_of(), [("read", BOUNDARIES)], heads=heads, group=group)


@pytest.mark.parametrize("options", [{"covariance": False}, {"values": False}, {"epsilon": 0.05}, {"epsilon": 0}])
def test_options(options):
    assert_same(policy(**options), head_of(**options), [("read", [70, 30])], heads=1, group=2, dim=8)


def test_yarns_temperature_scales_the_expected_queries():
    """Cached keys carry the factor already; so do the queries that will meet them."""
    rope = RopeConfig(kind="yarn", factor=1.0, original_max_position=512, attention_factor=1.5)
    events = [("read", [40, 20])]
    assert_same(policy(), head_of(scale=1.5), events, heads=1, group=2, rope=rope)


def test_with_alibi_keys_have_their_bias_and_nothing_rotates():
    """Four query heads have slopes 2^-2, 2^-4, 2^-6, 2^-8; far from the end of a row a steep head sees nothing."""
    events = [("read", [70, 30]), ("decode", 3), ("read", [20, 5])]
    head = head_of(slopes=[[2**-2, 2**-4], [2**-6, 2**-8]])
    assert_same(policy(), head, events, heads=2, group=2, positional="alibi")


def test_sinks_take_no_part_in_the_weights():
    """Sinks that draw one query head of a group would leave the choice to the other, were they normalised over."""
    lane = Lane(policy(), 1, 1, 2, DIM, 40, seed=6)
    lane.q[0, 0, 0] += 3
    ahead = np.mean([rotation(40 + j, DIM) for j in range(FUTURE)], axis=0)
    lane.k[0, 0, :SINK] = 5 * ahead @ lane.q[0, 0, 0].mean(axis=0) + lane.k[0, 0, :SINK]
    oracle = ExpectedHead(lane.q[0, 0], lane.k[0, 0], lane.v[0, 0])
    oracle.read(40)
    assert lane.play([("read", [40])]).driver.kept(lane.k)[0] == oracle.kept


def test_later_turns_choose_again_with_the_queries_of_all_turns():
    events = [("read", [30, 12, 1]), ("decode", 7), ("read", [9, 2, 0]), ("decode", 3), ("read", [1, 40, 20])]
    assert_same(policy(), head_of(), events, heads=2, group=2, seed=5)


@pytest.mark.parametrize(("heads", "group"), [(2, 2), (1, 4)], ids=["gqa", "mqa"])
@pytest.mark.parametrize("options", [{}, {"covariance": False}, {"values": False}], ids=str)
def test_statistics_of_texts_are_every_layers_own_on_every_turn(heads, group, options):
    profile = random_statistics(config_for(heads, DIM, 2, num_heads=heads * group))
    events = [("read", [1, BUDGET, 70]), ("decode", 5), ("read", [9, 2, 0])]
    for layer in (0, 1):
        head = head_of(texts=profile.queries(layer), **options)
        own = policy(profile=profile, **options)
        assert_same(own, head, events, heads=heads, group=group, layer=layer, layers=2)
    assert not own.signals.queries  # no query of a prompt is looked at


@pytest.mark.parametrize("texts", [False, True], ids=["prompt", "texts"])
def test_a_row_equals_the_row_alone(texts):
    profile = random_statistics(config_for(2, DIM, 1, num_heads=4)) if texts else None
    assert_alone(policy(profile=profile), [("read", [20, 70, 3]), ("decode", 4), ("read", [6, 1, 9])])


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=2), seed=st.integers(0, 10**6))
def test_any_lengths(lengths, seed):
    assert_same(policy(), head_of(), [("read", lengths)], heads=1, group=2, seed=seed)


def test_the_logit_is_the_log_of_the_mean_weight_of_gaussian_queries():
    """E[exp(q.k / sqrt(D))] by sampling a million queries; keys in several blocks."""
    rng = np.random.default_rng(0)
    mean, root = rng.standard_normal(DIM), 0.5 * rng.standard_normal((DIM, DIM))
    k = rng.standard_normal((1, 1, 600, DIM)).astype(np.float32)
    queries = mean + rng.standard_normal((200_000, DIM)) @ root.T
    sampled = np.log(np.exp(queries @ k[0, 0, ::60].T / np.sqrt(DIM)).mean(axis=0))
    as_stats = [jnp.asarray(x, jnp.float32)[None, None, None] for x in (mean, root @ root.T)]
    logits = expected_logits(jnp.asarray(k), *as_stats, DIM**-0.5)
    assert logits.shape == (1, 1, 1, 600)
    np.testing.assert_allclose(logits[0, 0, 0, ::60], sampled, atol=0.05)


def test_rotation_of_mean_and_covariance_is_by_the_averaged_matrix():
    rng = np.random.default_rng(1)
    mean, root = rng.standard_normal((3, 8)), rng.standard_normal((3, 8, 8))
    spread = root @ root.swapaxes(1, 2)
    matrix = np.mean([rotation(5 + j, 8) for j in range(9)], axis=0)
    cos, sin = np.diag(matrix)[:4], np.diag(matrix[4:, :4])
    got_mean, got_spread = rotate_ahead(*(jnp.asarray(x, jnp.float32)[None, None] for x in (mean, spread)),
                                        *(jnp.asarray(x, jnp.float32)[None] for x in (cos, sin)))  # fmt: skip
    np.testing.assert_allclose(got_mean[0, 0], mean @ matrix.T, atol=1e-5)
    np.testing.assert_allclose(got_spread[0, 0], matrix @ spread @ matrix.T, atol=1e-4)


def test_large_logits_neither_overflow_nor_vanish():
    lane = Lane(policy(), 1, 1, 2, 4, 40, seed=4)
    lane.k *= 100
    lane.q *= 10
    lane.play([("read", [40])])
    assert len(lane.driver.kept(lane.k)[0]) == BUDGET
    assert np.isfinite(np.asarray(lane.driver.cache.state.covariance)).all()


def test_weights_far_below_the_smallest_float_are_still_in_order():
    """Of logits that span a thousand, float32 weights are zeros but for the largest, and ties would decide."""
    lane = Lane(policy(covariance=False, values=False), 1, 1, 1, 4, 40, seed=4)
    ahead = np.mean([rotation(40 + j, DIM) for j in range(FUTURE)], axis=0)
    mean = ahead @ lane.q[0, 0, 0, SINK:].mean(axis=0)
    order = np.random.default_rng(0).permutation(40)
    lane.k[0, 0] = mean * (-50.0 * order[:, None]) / (mean @ mean) + 0.01 * lane.k[0, 0]
    kept = lane.play([("read", [40])]).driver.kept(lane.k)[0]
    rest = sorted(range(SINK, 40), key=lambda t: order[t])[: BUDGET - SINK]
    assert kept == sorted([*range(SINK), *rest])


@pytest.mark.parametrize(
    "bad",
    [
        dict(sink=-1),
        dict(future=0),
        dict(future=1.5),
        dict(epsilon=-1),
        dict(epsilon="no"),
        dict(budget=4),
        dict(ratio=0),
    ],
)
def test_bad_parameters_are_one_sentence(bad):
    with pytest.raises(UsageError) as error:
        ExpectedAttention(**bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_defaults_are_the_originals_and_epsilon_the_leaderboards():
    policy = ExpectedAttention()
    assert (policy.budget, policy.sink, policy.future, policy.epsilon) == (2048, 4, 512, 0.01)
    assert policy.signals.query_skip == 4 and config_for(1, 4).num_heads == 2
