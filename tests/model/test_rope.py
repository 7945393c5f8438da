"""Rotary angles of several rows: those of each row alone, also where all rows share them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import toys

from kvjax.model.config import RopeConfig
from kvjax.model.rope import angles, angles_of_layers, apply_rope, prompt_positions

KINDS = {
    "default": {},
    "linear": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position": 16},
    "llama3": {"factor": 4.0, "original_max_position": 16},
    "dynamic": {"factor": 2.0, "original_max_position": 16},
    "longrope": {
        "factor": 2.0,
        "original_max_position": 16,
        "short_factor": (1.0,) * 4,
        "long_factor": (1.0, 2.0, 3.0, 4.0),
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_share_positions_are_rotated_as_each_alone(kind):
    """A prompt's first tokens have one run of positions; frequencies that follow a row's length differ all the same."""
    config = toys.tiny_config(head_dim=8, rope=RopeConfig(kind=kind, **KINDS[kind]))
    count, tokens = jnp.asarray([30, 7]), 32
    (shared,) = angles_of_layers([config], prompt_positions(0 * count, tokens, fresh=True), count)
    (by_row,) = angles_of_layers([config], prompt_positions(0 * count, tokens, fresh=False), count)
    assert shared is not None and by_row is not None
    assert len(shared[0]) == (2 if kind in ("dynamic", "longrope") else 1) and len(by_row[0]) == 2
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, tokens, 1, 8)), jnp.float32)
    np.testing.assert_array_equal(apply_rope(x, shared), apply_rope(x, by_row))
    for row in range(2):
        alone = angles(config, jnp.arange(tokens)[None], count[row : row + 1])
        np.testing.assert_array_equal(apply_rope(x, by_row)[row], apply_rope(x[row : row + 1], alone)[0])
    later = prompt_positions(jnp.asarray([5, 9]), 3, fresh=False)
    np.testing.assert_array_equal(later, [[5, 6, 7], [9, 10, 11]])
