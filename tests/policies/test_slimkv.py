"""SlimKV against the paper's equations [3-5] and Listing 1 in NumPy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choosing import Lane, assert_alone, assert_same
from support.choosing_heads import SlimHead

from kvjax.errors import UsageError
from kvjax.policies import SlimKV

W, C, KERNEL = 4, 10, 5  # the oracle's defaults
BOUNDARIES = [1, W - 1, W, W + 1, C - 1, C, C + 1, 40, 70]


def head_of(**options):
    return lambda *args, **place: SlimHead(*args, **options, **place)


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (2, 2), (1, 4)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_choices_are_the_papers_around_every_boundary(heads, group, pooling):
    policy = SlimKV(budget=C, window=W, kernel=KERNEL, pooling=pooling)
    assert_same(policy, head_of(pooling=pooling), [("read", BOUNDARIES)], heads=heads, group=group)


@pytest.mark.parametrize("score", ["s1", "s2"])
def test_ablations(score):
    policy = SlimKV(budget=C, window=W, kernel=3, score=score)
    assert_same(policy, head_of(score=score, kernel=3), [("read", [70, 11])], heads=2, group=2)
    assert bool(policy.signals.window) == (score == "s1"), "values alone need no attention"


def test_later_turns_choose_again_over_what_is_there():
    events = [("read", [30, 12, 5]), ("decode", 7), ("read", [9, 2, 0]), ("decode", 3), ("read", [1, 40, 20])]
    assert_same(SlimKV(budget=C, window=W, kernel=KERNEL), head_of(), events, heads=2, group=2, seed=5)


def test_a_row_equals_the_row_alone():
    assert_alone(SlimKV(budget=C, window=W), [("read", [20, 70, 3]), ("decode", 4), ("read", [6, 1, 9])])


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=2), seed=st.integers(0, 10**6))
def test_any_lengths(lengths, seed):
    assert_same(SlimKV(budget=C, window=W, kernel=KERNEL), head_of(), [("read", lengths)], heads=1, group=2, seed=seed)


def test_a_large_value_is_kept_though_little_is_attended_to():
    """What the paper adds to SnapKV: a large activation in the value cache outweighs a small attention."""

    def kept(policy) -> list[int]:
        lane = Lane(policy, 1, 1, 1, 4, 40, seed=2)
        lane.q[:] = 0  # attention is flat
        lane.v[0, 0, 7, 2] = -50
        return lane.play([("read", [40])]).driver.kept(lane.k)[0]

    options = dict(budget=C, window=W, kernel=1)
    assert 7 in kept(SlimKV(**options)) and 7 not in kept(SlimKV(score="s1", **options))


@pytest.mark.parametrize(
    "bad",
    [dict(score="s3"), dict(window=0), dict(kernel=6), dict(pooling=""), dict(budget=32), dict(budget=128, ratio=0.1)],
)
def test_bad_parameters_are_one_sentence(bad):
    with pytest.raises(UsageError) as error:
        SlimKV(**bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_defaults_are_the_papers():
    policy = SlimKV()
    assert (policy.budget, policy.window, policy.kernel, policy.pooling) == (2048, 32, 5, "avg")
