"""A scorer and gates trained on a mesh are those of one device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.devices import printed


def test_a_training_on_a_mesh_is_that_of_one_device():
    one, model, both, data = printed(Path(__file__).with_name("training_on_meshes.py"))
    assert [found["mesh"] for found in (one, model, both, data)] == [
        None,
        "data=1,model=2",
        "data=2,model=2",
        "data=2,model=1",
    ]
    for found in (model, both, data):
        np.testing.assert_allclose(found["scorer"], one["scorer"], rtol=1e-4)
        np.testing.assert_allclose(found["correlation"], one["correlation"], atol=1e-3)
    # A step takes a text for each part of the data axis.
    for found, same in ((model, one), (both, data)):
        np.testing.assert_allclose(found["gates"], same["gates"], atol=1e-3)
        np.testing.assert_allclose(found["losses"], same["losses"], rtol=1e-3)
    assert np.abs(np.subtract(data["losses"], one["losses"])).max() > 1e-3, "other texts"
    assert one["scorer"][-1] < 0.5 * one["scorer"][0] and one["losses"][-1] < one["losses"][0]
