"""Standard errors and paired differences, against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.eval.suites import bootstrap


def test_standard_errors_are_those_of_the_mean():
    rng = np.random.default_rng(0)
    values = rng.normal(0.5, 0.2, 200).tolist()
    found = bootstrap.estimate({"a": values}, 1)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.error == pytest.approx(np.std(values, ddof=1) / math.sqrt(200), rel=0.06)
    # Two tasks of equal weight: 0 and 1 without spread.
    assert bootstrap.estimate({"a": [0, 0, 0], "b": [1, 1]}, 1) == bootstrap.Estimated(0.5, 0)
    assert bootstrap.estimate({"a": values}, 1) == found != bootstrap.estimate({"a": values}, 2)
    # Two values: their mean's standard error is half their distance.
    assert bootstrap.estimate({"a": [0.0, 1.0]}, 1).error == pytest.approx(0.5, rel=0.03)
    assert math.isnan(bootstrap.estimate({"a": [1.0], "b": [0.0, 1.0]}, 1).error)
    assert math.isnan(bootstrap.estimate({}, 1).mean)


def test_paired_differences():
    pairs = [(0.4, 0.5), (0.2, 0.3), (0.7, 0.8)] * 5
    found = bootstrap.difference({"a": pairs}, 1)
    assert found.mean == pytest.approx(-0.1) and found.error < 1e-9  # in pairs, nothing varies
    assert found.p == pytest.approx(2 / 2001) and found.high == pytest.approx(-0.1)
    same = bootstrap.difference({"a": [(1, 1), (0, 0), (1, 1)]}, 1)
    assert (same.mean, same.p) == (0, 1)
    mixed = bootstrap.difference({"a": [(1, 0), (0, 1)] * 20}, 1)
    assert mixed.mean == 0 and mixed.p > 0.5 and mixed.low < 0 < mixed.high
    # Two that differ alike cannot be significant, nor six in forty beyond what a sign test allows.
    assert bootstrap.difference({"a": [(0, 1)] * 2}, 1).p == 0.5
    assert bootstrap.difference({"a": [(0, 1)] * 2, "b": [(1, 1)] * 2}, 1).p == 0.5
    assert bootstrap.difference({"a": [(0, 1)] * 6 + [(1, 1)] * 34}, 1).p == 2**-5
    assert bootstrap.difference({"a": [(1, 0)]}, 1) is None and bootstrap.difference({}, 1) is None


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=12))
@settings(max_examples=25, deadline=None)
def test_differences_change_sign_with_their_sides(pairs):
    one = bootstrap.difference({"a": pairs}, 3)
    other = bootstrap.difference({"a": [(b, a) for a, b in pairs]}, 3)
    assert one.mean == pytest.approx(-other.mean) and one.p == other.p and 0 < one.p <= 1
