"""Weights lie as their chip multiplies them; where there is none such, as they came."""

import jax
import jax.numpy as jnp
import pytest

from kvjax.model.tiling import tiled, weight_layout


@pytest.mark.parametrize(
    ("kind", "dtype", "ndim", "rows"),
    [
        ("TPU7x", jnp.bfloat16, 2, 16),
        ("TPU7x", jnp.bfloat16, 1, None),
        ("TPU7x", jnp.float32, 2, None),
        ("TPU v6 lite", jnp.bfloat16, 2, None),
        ("NVIDIA H200", jnp.bfloat16, 2, None),
        ("cpu", jnp.bfloat16, 2, None),
    ],
)
def test_only_one_kind_wants_other_tiles(kind, dtype, ndim, rows):
    layout = weight_layout(kind, dtype, ndim)
    assert (None if layout is None else layout.tiling[0][0]) == rows


def test_a_weight_that_is_as_it_should_be_stays():
    weight = jnp.ones((32, 128), jnp.bfloat16)
    assert tiled(weight) is weight and weight.sharding.device_set == {jax.devices()[0]}
