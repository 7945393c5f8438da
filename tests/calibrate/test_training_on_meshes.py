"""A scorer and gates trained on a mesh are those of one device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.devices import printed

SCRIPT = Path(__file__).with_name("training_on_meshes.py")


def check_scorers(found, one):
    np.testing.assert_allclose(found["scorer"], one["scorer"], rtol=1e-4)
    np.testing.assert_allclose(found["correlation"], one["correlation"], atol=1e-3)


def check_gates(found, same):
    np.testing.assert_allclose(found["gates"], same["gates"], atol=1e-3)
    np.testing.assert_allclose(found["losses"], same["losses"], rtol=1e-3)


@pytest.mark.slow
def test_a_training_over_the_model_axis_is_that_of_one_device():
    one, model = printed(SCRIPT, "none", "data=1,model=2")
    check_scorers(model, one)
    check_gates(model, one)
    assert one["scorer"][-1] < 0.5 * one["scorer"][0] and one["losses"][-1] < one["losses"][0]


@pytest.mark.slow
def test_a_training_over_the_data_axis_takes_a_text_for_each_of_its_parts():
    one, both, data = printed(SCRIPT, "none", "data=2,model=2", "data=2,model=1")
    for found in (both, data):
        check_scorers(found, one)
    check_gates(both, data)
    assert np.abs(np.subtract(data["losses"], one["losses"])).max() > 1e-3, "other texts"
