"""The options of rows as the compiled loop has them."""

from __future__ import annotations

import jax.numpy as jnp

import kvjax
from kvjax.controls import controls_of, known_ids, stops_of


def test_rows_have_their_own_numbers_and_share_what_is_computed_for_any(tiny_model):
    plain, sampled = kvjax.GenerationOptions(), kvjax.GenerationOptions(temperature=0.5, top_k=3, seed=7)
    draws, stops = [(0, 0, 0), (7, 1, 0)], stops_of(tiny_model, (), (1,), 2)
    found = controls_of(tiny_model, [plain, sampled], draws, [4, 2**31 - 1], stops)
    assert found.sampling.temperature.tolist() == [0.0, 0.5] and found.max_new_tokens.tolist() == [4, 2**31 - 1]
    assert found.sampling.top_k.tolist() == [tiny_model.config.vocab_size, 3]
    assert found.sampling.draws.tolist() == [[0, 0, 0], [7, 1, 0]] and found.sampling.draws.dtype == jnp.uint32
    assert found.sampling.temperature.dtype == jnp.float32 and found.max_new_tokens.dtype == jnp.int32
    assert int(found.sampling.known) == known_ids(tiny_model) and int(found.least_running) == 1
    assert int(found.max_position) == tiny_model.config.max_position
    assert not found.logprobs, "nobody asked, and they take time"
    asked = kvjax.GenerationOptions(logprobs=True)
    assert controls_of(tiny_model, [plain, asked], draws, [4, 4], stops).logprobs
