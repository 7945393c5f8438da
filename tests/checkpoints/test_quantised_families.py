"""Every family's tensors, experts and fused ones among them, are rounded to what the whole float matrices round to."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx
from support import family_cases as cases

from kvjax.checkpoints.load import load
from kvjax.model.quantised import QuantisedArray, rounded


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_numbers_are_those_of_the_rounded_floats(case, tmp_path):
    folder = cases.write_folder(case, tmp_path / case.name, cases.values(case, cases.shapes(case)))
    plain, int8 = (load(folder, dtype="float32", weights=weights, progress=False) for weights in (None, "int8"))
    of_floats, of_integers = (dict(nnx.to_flat_state(nnx.state(lm.params))) for lm in (plain, int8))
    assert of_floats.keys() == of_integers.keys()
    for path, one in of_floats.items():
        other = of_integers[path]
        floats, found = np.asarray(one.get_value()), other.get_value()
        if not isinstance(found, QuantisedArray):
            np.testing.assert_array_equal(floats, found)
            assert floats.ndim == 1 or path[-1] in ("router", "shared_gate", "gate_up_bias", "down_bias")
            continue
        if one.get_metadata("transposed") != other.get_metadata("transposed"):
            floats = np.ascontiguousarray(floats.swapaxes(-1, -2))
        values, scale = rounded(floats)
        np.testing.assert_array_equal(found.values, values)
        np.testing.assert_array_equal(found.scale, scale[..., 0])
