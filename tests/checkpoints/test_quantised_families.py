"""Every family's tensors, experts and fused ones among them, are rounded to what the whole float matrices round to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import family_cases as cases

from kvjax.checkpoints.load import load
from kvjax.model.group_quantised import GroupQuantised, rounded_groups
from kvjax.model.quantised import QuantisedArray, rounded
from pallas_kernels.quantised_matmul import weight_tiles


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_numbers_are_those_of_the_rounded_floats(case, tmp_path):
    folder = cases.write_folder(case, tmp_path / case.name, cases.values(case, cases.shapes(case)))
    plain, int8, int4 = (_params(folder, weights) for weights in (None, "int8", "int4"))
    assert plain.keys() == int8.keys() == int4.keys()
    grouped = 0
    for path, one in plain.items():
        floats, found = np.asarray(one.get_value()), int8[path].get_value()
        if not isinstance(found, QuantisedArray):
            np.testing.assert_array_equal(floats, found)
            np.testing.assert_array_equal(floats, int4[path].get_value())
            assert floats.ndim == 1 or path[-1] in ("router", "shared_gate", "gate_up_bias", "down_bias")
            continue
        if one.get_metadata("transposed") != int8[path].get_metadata("transposed"):
            floats = np.ascontiguousarray(floats.swapaxes(-1, -2))
        values, scale = rounded(floats)
        np.testing.assert_array_equal(found.values, values)
        np.testing.assert_array_equal(found.scale, scale[..., 0])
        coarse = int4[path].get_value()
        if isinstance(coarse, QuantisedArray):
            assert path[-1] in ("embedding", "head") or floats.shape[-1] % 32
            np.testing.assert_array_equal(coarse.values, values)
            continue
        grouped += 1
        assert isinstance(coarse, GroupQuantised) and coarse.shape == floats.shape and coarse.bits == 4
        values, scale = rounded_groups(floats, coarse.group)
        np.testing.assert_array_equal(weight_tiles.unpacked(coarse.values), values)
        np.testing.assert_array_equal(coarse.scale.swapaxes(-1, -2), scale)
    assert grouped


def test_experts_of_two_forms_give_what_they_give_one_by_one(tmp_path):
    """24 channels are no whole groups: what comes out of them is int8 beside gates in groups, as in some GGUF files."""
    case = next(case for case in cases.CASES if case.name == "mixtral")
    folder = cases.write_folder(case, tmp_path / case.name, cases.values(case, cases.shapes(case)))
    experts = load(folder, dtype="float32", weights="int4", progress=False).params.layers[0].experts
    assert isinstance(experts.gate_up[...], GroupQuantised) and isinstance(experts.down[...], QuantisedArray)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((17, 32)), jnp.float32)
    share, chosen = experts.routed(x)
    each = experts._one_by_one(x, chosen).reshape(17, 2, 32)
    found = jax.jit(lambda x: experts(x, experts.routed(x)))(x)  # which traces the form of every platform
    np.testing.assert_allclose(found, (each * share[..., None]).sum(axis=1), atol=1e-5)


def _params(folder, weights):
    params = load(folder, dtype="float32", weights=weights, progress=False).params
    return dict(nnx.to_flat_state(nnx.state(params)))
