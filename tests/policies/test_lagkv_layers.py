"""LagKV compacts all layers at once: to the bit what it makes of them one after another, and much less to compile."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import toys

import kvjax
from kvjax.policies.lagkv import LagKV
from kvjax.runtime.programs import DECODE_CHUNK
from kvjax.runtime.synthetic import benchmark_controls, decode_state, filled_cache
from kvjax.sharding.compile import OneDevice

PROMPTS = [list(range(3, 80)), list(range(60, 20, -1))]
HOW = [{}, {"storage": "int8"}, {"context": PROMPTS[0]}, {"variant": "l2"}]


@dataclasses.dataclass(frozen=True)
class OneByOne(LagKV):
    """The same policy as somebody derives it who changes what becomes of a layer."""

    def maintain(self, layer, cache, config, row, seen):
        return super().maintain(layer, cache, config, row, seen)


@pytest.fixture(scope="module")
def lm(tiny_model):
    """``tiny_model`` sets how it is compiled."""
    return toys.tiny_model(num_layers=4, hidden_size=16, intermediate_size=16)


@pytest.mark.parametrize("how", HOW, ids=lambda how: next(iter(how), "plain"))
def test_layers_at_once_are_layers_one_by_one(lm, how):
    options = {"max_new_tokens": 40, "stop_token_ids": (), "logprobs": True} | how
    variant = options.pop("variant", "lag")
    found = []
    for kind in (LagKV, OneByOne):
        policy = kind(ratio=0.5, lag=8, sink=4, variant=variant)
        outputs = kvjax.generate(lm, PROMPTS, policy=policy, **options)
        leaves = [np.asarray(leaf).tobytes() for output in outputs for leaf in jax.tree.leaves(output.cache)]
        found.append(([(output.tokens, output.logprobs, output.stats.retained) for output in outputs], leaves))
    assert found[0] == found[1]
    shorter = outputs[1].stats  # what it decoded is compacted too
    assert max(shorter.retained[-1]) < 0.8 * shorter.seen


@pytest.mark.slow
def test_a_layer_more_is_little_to_compile():
    lm = toys.tiny_model(num_layers=6, hidden_size=16, intermediate_size=16)

    def kernels(policy):
        state = decode_state(lm.config, filled_cache(lm.config, policy, 1, 200))
        given = OneDevice(lm.config, policy), lm.params, state, benchmark_controls(lm.config, 1), np.int32(1)
        return DECODE_CHUNK.lower(*given).compile().as_text().count(" fusion(")

    assert kernels(LagKV(ratio=0.5, lag=8)) < kernels(OneByOne(ratio=0.5, lag=8)) - 50
