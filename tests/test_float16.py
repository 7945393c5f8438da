"""Weights and caches in float16: every step's numbers stay finite, and close to float32's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.scorers import with_profiles

import kvjax
from kvjax.policies import parse, registry

PROMPT = "The lighthouse of Alma stands on a rock, and was lit by hand until the keeper's daughter left. " * 2
SIZES = {"full": "", "lagkv": ":ratio=0.5,lag=8,sink=4", "razor": ":heads=0.0,budget=48", "round": ":watershed=1"}


@pytest.fixture(scope="module")
def half(tiny_model):
    """The toy with its weights in float16."""
    params = jax.tree.map(lambda x: x.astype(jnp.float16), tiny_model.params)
    return dataclasses.replace(tiny_model, params=params)


@pytest.mark.parametrize(
    "policy",
    [
        name if name in ("full", "lagkv", "h2o", "expected_attention", "compensated", "round") else
        pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(registry())
    ],
)  # fmt: skip
def test_every_policy_gives_what_float32_gives(tiny_model, half, policy):
    policy = parse(policy + SIZES.get(policy, ":budget=48"))
    policy = with_profiles(policy, tiny_model.config)
    wanted = kvjax.generate(tiny_model, PROMPT, policy=policy, max_new_tokens=12, logprobs=True)
    found = kvjax.score(half, PROMPT, wanted.tokens, policy=policy, way="decode")
    assert np.isfinite(found.logprobs).all()
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=0.05)
    cache = kvjax.generate(half, PROMPT, policy=policy, max_new_tokens=1).cache
    assert {leaf.dtype for pool in cache.device_layers.pools for leaf in jax.tree.leaves(pool.kv)} == {
        jnp.dtype(jnp.float16)
    }


@pytest.mark.slow
def test_it_is_planned_and_saved_as_it_is(half, tmp_path):
    output = kvjax.generate(half, PROMPT, max_new_tokens=4)
    planned = kvjax.plan(half, prompt_tokens=output.stats.prompt_tokens, max_new_tokens=4)
    assert planned.cache_bytes == output.stats.cache_bytes
    kvjax.save_cache(tmp_path / "half", output.cache, half)
    again = kvjax.load_cache(tmp_path / "half", half)
    one, other = (kvjax.generate(half, "Why?", cache=cache, max_new_tokens=4) for cache in (output.cache, again))
    assert one.tokens == other.tokens
