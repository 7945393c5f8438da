"""SnapKV against the paper's rule in NumPy: window mass, pooling, group, the prefix's best and the window."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choosing import assert_alone, assert_same, pooled
from support.choosing_heads import SnapHead

from kvjax.errors import UsageError
from kvjax.policies import SnapKV
from kvjax.policies.pooling import pool

W, BUDGET, KERNEL = 4, 10, 5  # the oracle's defaults
BOUNDARIES = [1, W - 1, W, W + 1, BUDGET - 1, BUDGET, BUDGET + 1, 40, 70]


def head_of(**options):
    return lambda *args, **place: SnapHead(*args, **options, **place)


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (2, 2), (1, 4)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("options", [{}, {"pooling": "max"}], ids=["avg", "max"])
def test_choices_are_the_rule_around_every_boundary(heads, group, options):
    policy = SnapKV(budget=BUDGET, window=W, kernel=KERNEL, **options)
    assert_same(policy, head_of(**options), [("read", BOUNDARIES)], heads=heads, group=group)


@pytest.mark.parametrize(
    "options",
    [
        {"group": "max"},
        {"group": "sum", "pooling": "max", "kernel": 7},
        {"kernel": 1},
        {"window": 1, "kernel": 3, "group": "max", "pooling": "max"},
    ],
)
def test_options(options):
    size = {"size": 12, **options}
    assert_same(
        SnapKV(budget=12, **{"window": W, **options}), head_of(**size), [("read", [70, 13, 12])], heads=2, group=3
    )


def test_later_turns_choose_again_over_what_is_there():
    """Kept, decoded and new tokens; a turn shorter than the window has fewer queries; an empty one changes nothing."""
    events = [("read", [30, 12, 5]), ("decode", 7), ("read", [9, 2, 0]), ("decode", 3), ("read", [1, 40, 20])]
    assert_same(SnapKV(budget=BUDGET, window=W, kernel=KERNEL), head_of(), events, heads=2, group=2, seed=5)


def test_a_row_equals_the_row_alone():
    policy = SnapKV(budget=BUDGET, window=W)
    assert_alone(policy, [("read", [20, 70, 3]), ("decode", 4), ("read", [6, 1, 9])])


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=2), seed=st.integers(0, 10**6))
def test_any_lengths(lengths, seed):
    policy = SnapKV(budget=BUDGET, window=W, kernel=KERNEL)
    assert_same(policy, head_of(), [("read", lengths)], heads=1, group=2, seed=seed)


def test_ratio_sizes_each_row_by_its_own_length():
    policy = SnapKV(ratio=0.5, window=W, kernel=KERNEL)

    class PageSharding(SnapHead):
        def budget(self, total):
            return max(total // 2, W + 1)

    assert_same(
        policy, PageSharding, [("read", [4, 6, 10, 11, 70]), ("decode", 5), ("read", [3, 3, 3, 3, 3])], heads=2, group=2
    )


def test_pooling_is_torchs():
    """Numbers from torch.nn.functional.avg_pool1d and max_pool1d, kernel 5, padding 2, stride 1."""
    x = jnp.array([[1.0, 5, 2, 0, 3, 7, 99, -99]])
    length = jnp.array([6])
    average = pool(x, length, 5, "avg")
    np.testing.assert_allclose(average[0, :6], [1.6, 1.6, 2.2, 3.4, 2.4, 2.0], rtol=1e-6)
    np.testing.assert_array_equal(pool(x, length, 5, "max")[0, :6], [5, 5, 5, 7, 7, 7])
    assert (np.asarray(average[0, 6:]) == 0).all() and np.isfinite(pool(x, length * 0, 5, "max")).all()


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(0, 12),
    kernel=st.sampled_from([1, 3, 5, 7, 15]),
    kind=st.sampled_from(["avg", "max"]),
    seed=st.integers(0, 100),
)
def test_pooling_ends_where_the_row_ends(length, kernel, kind, seed):
    """Padding and neighbours beyond a run never leak in, at any length, in a batch."""
    x = np.random.default_rng(seed).standard_normal((2, 12)).astype(np.float32)
    lengths = np.array([length, 12 - length])
    result = pool(jnp.asarray(x), jnp.asarray(lengths), kernel, kind)
    for row, count in enumerate(lengths):
        expected = pooled(list(x[row, :count].astype(np.float64)), kernel, kind)
        np.testing.assert_allclose(result[row, :count], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "bad",
    [dict(window=0), dict(window=2.5), dict(kernel=4), dict(kernel=0), dict(pooling="min"), dict(group="median"),
     dict(budget=32), dict(budget=4, window=4), dict(ratio=0), dict(ratio=1.1), dict(budget=100, ratio=0.5)],
)  # fmt: skip
def test_bad_parameters_are_one_sentence(bad):
    with pytest.raises(UsageError) as error:
        SnapKV(**bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
