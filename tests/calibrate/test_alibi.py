"""Scopes of ALiBi heads against equation [2] with whole matrices, and the promise that nothing beyond them matters."""

from __future__ import annotations

import functools
import math

import bloom_oracle
import jax
import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.calibrate import alibi_scopes, load_profile, save_profile
from kvjax.errors import UsageError
from kvjax.model.decoder import logical
from kvjax.policies import LagKV, RazorAttention
from kvjax.policies.profile import scope_lengths

SHAPE = dict(positional="alibi", norm="layer", mlp="gelu", qkv_bias=True, output_bias=True, mlp_bias=True)


@functools.cache
def model(seed: int = 0, scale: float = 0.08, **changes):
    """A random ALiBi model whose projections are small enough for scopes shorter than its prompts, and whose norms
    differ from channel to channel.
    """
    lm = toys.tiny_model(**(SHAPE | changes))
    rng = np.random.default_rng(seed)
    for layer in lm.params.layers:
        weight = logical(layer.qkv)
        # Values keep their size: what is attended to must be seen in the output.
        factor = np.ones(weight.shape[2])
        factor[:-1] = scale
        layer.qkv[...] = (weight * factor[:, None]).reshape(layer.qkv.shape)
        layer.qkv_bias[...] = jax.numpy.asarray(rng.standard_normal(layer.qkv_bias.shape) * 0.05, np.float32)
        layer.input_norm.weight[...] = jax.numpy.asarray(rng.uniform(0.1, 1.5, 32), np.float32)
        layer.input_norm.bias[...] = jax.numpy.asarray(rng.standard_normal(32) * 0.1, np.float32)
    return lm


def parts_of(layer) -> tuple[np.ndarray, ...]:
    values = layer.qkv, layer.qkv_bias, layer.input_norm.weight, layer.input_norm.bias
    return tuple(np.asarray(logical(x), np.float64) for x in values)


@pytest.mark.parametrize("heads", [2, 4])
def test_bounds_are_the_equations_with_whole_matrices(heads):
    lm = model(num_kv_heads=heads)
    profile = alibi_scopes(lm)
    slopes = bloom_oracle.slopes(4)
    for index, layer in enumerate(lm.params.layers):
        weight, bias, gamma, beta = parts_of(layer)
        for query in range(4):
            head, member = divmod(query, 4 // heads)
            paper = np.linalg.norm(weight[:, head, member] @ weight[:, head, -2].T, 2)
            paper *= 2 * (np.sum(gamma**2) + np.sum(beta**2))
            wide = np.concatenate([weight, bias[None]])[:, head]
            safe = np.linalg.norm(wide[:, member] @ wide[:, -2].T, 2) * 2 / math.sqrt(8)
            safe *= (math.sqrt(32) * np.abs(gamma).max() + np.linalg.norm(beta)) ** 2 + 1
            assert profile.paper[index][query] == pytest.approx(paper, rel=1e-6)
            assert profile.safe[index][query] == pytest.approx(safe, rel=1e-6)
            assert profile.slopes[index][query] == pytest.approx(slopes[query], rel=1e-6)
            longest = max(
                (profile.paper[index][head * (4 // heads) + i] - math.log(0.001)) / slopes[head * (4 // heads) + i]
                for i in range(4 // heads)
            )
            assert scope_lengths(profile, "paper", 0.001)[index][head] == math.ceil(longest)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.02, 0.08, 0.3]),
    kind=st.sampled_from(["normal", "spikes", "two"]),
    eps=st.sampled_from([0.1, 0.001]),
)
def test_beyond_a_safe_scope_no_token_gets_more_than_eps(seed, scale, kind, eps):
    lm = model(seed % 3, scale)
    lengths = scope_lengths(alibi_scopes(lm), "safe", eps)
    rng, tokens = np.random.default_rng(seed), 240
    x = rng.standard_normal((tokens, 32))
    if kind == "spikes":  # all of a norm's length in one channel
        x = np.eye(32)[rng.integers(0, 32, tokens)] * rng.choice([-1, 1], (tokens, 1))
    if kind == "two":  # a few tokens again and again
        x = x[rng.integers(0, 2, tokens)]
    apart = np.arange(tokens)[:, None] - np.arange(tokens)
    for layer, heads in zip(lm.params.layers, lengths, strict=True):
        weight, bias, gamma, beta = parts_of(layer)
        normal = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
        mixed = np.einsum("tm,mhgd->hgtd", gamma * normal + beta, weight) + bias[:, :, None]
        for query, slope in enumerate(bloom_oracle.slopes(4)):
            head, member = divmod(query, 2)
            logits = mixed[head, member] @ mixed[head, -2].T / math.sqrt(8) - slope * apart
            logits[apart < 0] = -np.inf
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            assert weights[apart >= heads[head]].max(initial=0) <= eps


def test_some_scopes_are_shorter_than_a_prompt():
    """Without which the tests here would promise nothing."""
    lengths = scope_lengths(alibi_scopes(model()), "safe", 0.001)
    assert min(min(heads) for heads in lengths) < 200


TEXT = "Some of this is worth remembering and most of it is not. " * 7  # 399 tokens of a byte


def test_a_model_answers_the_same_from_its_scopes_as_from_everything():
    """Two turns, so that kept tokens are attended to at their distances; the cache is ragged and smaller."""
    lm = model(num_kv_heads=4, num_heads=4)
    policy = RazorAttention(profile=alibi_scopes(lm), bound="safe", eps=1e-6)
    ask = dict(chat=False, max_new_tokens=12, stop_token_ids=(), logprobs=True)
    own, full = (kvjax.generate(lm, TEXT, policy=p, **ask) for p in (policy, None))
    again = [kvjax.generate(lm, TEXT[:60], cache=output.cache, **ask) for output in (own, full)]
    for mine, theirs in ((own, full), tuple(again)):
        assert mine.tokens == theirs.tokens
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)
    lengths = scope_lengths(policy.profile, "safe", 1e-6)
    kept = tuple(tuple(min(length, own.stats.seen) for length in heads) for heads in lengths)
    assert own.stats.retained == kept and min(map(min, kept)) < 200
    assert own.stats.cache_bytes < 0.9 * full.stats.cache_bytes
    planned = kvjax.plan(lm, prompt_tokens=len(TEXT), max_new_tokens=12, policy=policy)
    assert planned.cache_bytes == own.cache.nbytes
    assert (
        len({len(set(heads)) for heads in planned.capacities}) and planned.capacities[0][0] < planned.capacities[0][-1]
    )


def test_a_file_keeps_the_scopes(tmp_path):
    profile = alibi_scopes(model())
    save_profile(profile, tmp_path / "toy.yaml")
    assert load_profile(tmp_path / "toy.yaml") == profile


def test_each_kind_of_model_has_its_own_calibration():
    with pytest.raises(UsageError, match="kvjax calibrate retrieval-heads"):
        alibi_scopes(toys.tiny_model())
    lm = model()
    with pytest.raises(UsageError, match="kvjax calibrate alibi-scopes"):
        kvjax.calibrate.retrieval_heads(lm)
    with pytest.raises(UsageError, match="kvjax calibrate alibi-scopes"):
        RazorAttention().check(lm.config)
    for rotary_only in (dict(inner=LagKV()), dict(ratio=0.5), dict(budget=50), dict(heads="0.1")):
        with pytest.raises(UsageError, match="own scope"):
            RazorAttention(profile=alibi_scopes(lm), **rotary_only).check(lm.config)
