"""PyramidKV: its budgets by layer, what they add up to, and that each layer is SnapKV of its budget."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choosing import assert_alone, assert_same
from support.choosing_heads import SnapHead
from support.driver import config_for

from kvjax.errors import UsageError
from kvjax.policies import PyramidKV

W = 4


def line(total: int, average: int, window: int, beta: int, layers: int) -> list[float]:
    """The official numbers on a line: min = (C - W) // beta, max = 2 (C - W) - min, at most q_len - W; plus W."""
    least = (average - window) // beta
    most = 2 * (average - window) - least
    if most >= total - window:
        most = total - window
        least = 2 * (average - window) - most
    return [most - i * (most - least) / (layers - 1) + window for i in range(layers)]


def sizes(policy, layers, total):
    config = config_for(1, 4, layers=layers)
    return [int(policy.size(config, layer, np.array([total]))[0]) for layer in range(layers)]


@settings(max_examples=200, deadline=None)
@given(
    average=st.integers(5, 300),
    beyond=st.integers(0, 600),
    beta=st.integers(1, 40),
    layers=st.integers(2, 30),
)
def test_budgets_are_the_line_and_add_up_to_the_uniform_total(average, beyond, beta, layers):
    total = average + beyond
    found = sizes(PyramidKV(budget=average, window=W, beta=beta), layers, total)
    expected = line(total, average, W, beta, layers)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1
    assert sum(found) == layers * average
    assert found == sorted(found, reverse=True)
    assert found[-1] >= W and found[0] <= total


@pytest.mark.parametrize("total", [1, 9, 10])
def test_a_row_that_fits_the_average_is_whole_in_every_layer(total):
    config = config_for(1, 4, layers=5)
    policy = PyramidKV(budget=10, window=W)
    assert [int(policy.budgets(config, layer, np.array([total]))[0, 0]) for layer in range(5)] == [total] * 5


def test_one_layer_is_snapkv():
    assert sizes(PyramidKV(budget=10, window=W), 1, 100) == [10]


def test_beta_one_is_uniform():
    assert sizes(PyramidKV(budget=50, window=W, beta=1), 7, 1000) == [50] * 7


@settings(max_examples=60, deadline=None)
@given(
    size=st.one_of(st.integers(5, 200).map(lambda n: {"budget": n}), st.floats(0.05, 1).map(lambda r: {"ratio": r})),
    prompt=st.integers(1, 400),
    layers=st.integers(1, 12),
    beta=st.sampled_from([1, 3, 20]),
)
def test_no_row_outgrows_its_layers_capacity(size, prompt, layers, beta):
    policy, config = PyramidKV(window=W, beta=beta, **size), config_for(1, 4, layers=layers)
    capacities = policy.capacities(config, prompt, 7)
    totals = np.arange(1, prompt + 1, dtype=np.int32)
    for layer in range(layers):
        held = policy.budgets(config, layer, totals)[:, 0]
        assert held.max() + 7 == capacities[layer][0], "enough, and not a slot more"


def test_traced_budgets_are_the_hosts():
    policy, config = PyramidKV(ratio=0.3, window=W), config_for(1, 4, layers=6)
    totals = np.arange(1, 300, dtype=np.int32)
    for layer in range(6):
        np.testing.assert_array_equal(
            policy.size(config, layer, jnp.asarray(totals)), policy.size(config, layer, totals)
        )


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_each_layer_keeps_snapkvs_choice_for_its_budget(layer):
    """Rows around the average, where the line flattens, and beyond; budgets differ by row in one program."""
    average, layers, beta = 12, 4, 3

    class Head(SnapHead):
        def budget(self, total):
            if total <= average:
                return average
            steps = line(total, average, W, beta, layers)
            # A layer above the middle rounds up, its mirror image down.
            return int(np.ceil(steps[layer] - 1e-9)) if 2 * layer <= layers - 1 else int(np.floor(steps[layer] + 1e-9))

    policy = PyramidKV(budget=average, window=W, beta=beta)
    events = [("read", [3, 11, 12, 13, 15, 20, 60]), ("decode", 5), ("read", [2, 1, 3, 9, 30, 1, 4])]
    assert_same(policy, Head, events, heads=2, group=2, layer=layer, layers=layers)


def test_a_row_equals_the_row_alone():
    assert_alone(PyramidKV(budget=12, window=W), [("read", [20, 70, 3]), ("decode", 4), ("read", [6, 1, 9])])


@pytest.mark.parametrize(
    "bad", [dict(beta=0), dict(beta=1.5), dict(window=0), dict(kernel=2), dict(budget=32), dict(ratio=2)]
)
def test_bad_parameters_are_one_sentence(bad):
    with pytest.raises(UsageError) as error:
        PyramidKV(**bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
