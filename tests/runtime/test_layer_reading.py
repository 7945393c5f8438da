"""A layer reads a batch a few rows at a time, in blocks of queries: each row as it would be read alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from kvjax.cache.buckets import rows_together
from kvjax.model.config import RopeConfig
from kvjax.model.decoder import random_decoder
from kvjax.model.rope import angles_of_layers, prompt_positions
from kvjax.policies.signals import Signals
from kvjax.runtime import prefill_layer as layer_reading
from kvjax.runtime.prefill_layer import read_rows
from kvjax.runtime.signal_collector import SignalCollector

TOKENS = 64
COUNT = jnp.asarray([64, 3, 0, 0, 33, 64, 1, 40], jnp.int32)


@pytest.mark.parametrize("kind", ["default", "dynamic"])
@pytest.mark.parametrize("together", [2, 4])
def test_rows_read_a_few_at_a_time_are_the_rows_alone(kind, together, monkeypatch):
    rope = RopeConfig(kind=kind, factor=2.0, original_max_position=16) if kind == "dynamic" else RopeConfig()
    config = toys.tiny_config(num_layers=1, rope=rope)
    layer = random_decoder(config).layers[0]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, TOKENS, config.hidden_size)), jnp.float32)

    def read(x, count):
        (angles,) = angles_of_layers([config], prompt_positions(0 * count, TOKENS, fresh=True), count)
        observed = SignalCollector(
            Signals(window=4, columns=True), config, 0 * count, count, count - 4, 0.3 + 0 * count, 4
        )
        return read_rows(layer, x, angles, None, count, jnp.int32(0), observed)

    monkeypatch.setattr(layer_reading, "rows_together", lambda batch, block: min(batch, together))
    found = jax.jit(read)(x, COUNT)
    assert rows_together(32, 32) < 32, "so are the rows of a batch on a CPU"
    for row, count in enumerate(COUNT.tolist()):
        alone = jax.jit(read)(x[row : row + 1], COUNT[row : row + 1])
        for whole, own in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
            there = [np.asarray(a) for a in (whole[row], own[0])]
            if there[0].shape[0] == TOKENS:  # hidden states; beyond the row's blocks nothing was read
                there = [a[:count] for a in there]
            elif there[0].ndim > 1 and there[0].shape[1] == TOKENS:
                there = [a[:, :count] for a in there]
            np.testing.assert_allclose(*there, rtol=1e-5, atol=1e-5)
    real = (jnp.arange(TOKENS) < COUNT[:, None])[..., None]
    padded = jax.jit(read)(jnp.where(real, x, jnp.nan), COUNT)  # whatever padding holds
    for whole, other in zip(jax.tree.leaves(found[1:]), jax.tree.leaves(padded[1:]), strict=True):
        np.testing.assert_array_equal(whole, other)
    np.testing.assert_array_equal(jnp.where(real, found[0], 0), jnp.where(real, padded[0], 0))
    if together == 2:
        np.testing.assert_array_equal(found[0][2:4], x[2:4], "rows that are read together and have no tokens")


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("heads", [{}, {"qk_norm": True}, {"qk_norm_across_heads": True}, {"qk_norm_by_head": True}])
def test_padding_is_zeros_to_norms_without_an_epsilon_too(norm, heads):
    config = toys.tiny_config(num_layers=1, norm=norm, rms_norm_eps=0.0, **heads)
    layer, count = random_decoder(config).layers[0], jnp.asarray([40], jnp.int32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, TOKENS, config.hidden_size)), jnp.float32)
    (angles,) = angles_of_layers([config], prompt_positions(0 * count, TOKENS, fresh=True), count)
    after, keys, values, _ = read_rows(layer, x, angles, None, count, jnp.int32(0))
    assert all(np.isfinite(array).all() for array in (after, keys, values))
