"""Scopes of ALiBi heads against equation [2] with whole matrices, and the promise that nothing beyond them matters."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from support import bloom_oracle

import kvjax
from kvjax.calibrate import alibi_scopes, load_profile, save_profile
from kvjax.errors import UsageError
from kvjax.model.params import logical
from kvjax.policies import LagKV, RazorAttention, parse
from kvjax.policies.head_choice import scope_lengths

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
            for bound, scale in (("paper", 1.0), ("scaled", 1 / math.sqrt(8))):
                longest = max(
                    (profile.paper[index][member] * scale - math.log(0.001)) / slopes[member]
                    for member in range(head * (4 // heads), (head + 1) * (4 // heads))
                )
                assert scope_lengths(profile, bound, 0.001, 1 / math.sqrt(8))[index][head] == math.ceil(longest)


def attention_weights(layer, x: np.ndarray) -> np.ndarray:
    """[query head, query, key] of ALiBi attention over the hidden states ``x``, from the definition."""
    weight, bias, gamma, beta = parts_of(layer)
    apart = np.arange(len(x))[:, None] - np.arange(len(x))
    normal = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
    mixed = np.einsum("tm,mhgd->hgtd", gamma * normal + beta, weight) + bias[:, :, None]
    found = []
    for query, slope in enumerate(bloom_oracle.slopes(4)):
        head, member = divmod(query, 2)
        logits = mixed[head, member] @ mixed[head, -2].T / math.sqrt(8) - slope * apart
        logits[apart < 0] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        found.append(weights / weights.sum(axis=1, keepdims=True))
    return np.array(found)


def hidden_states(kind: str, seed: int, tokens: int = 240) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, 32))
    if kind == "spikes":  # all of a norm's length in one channel
        x = np.eye(32)[rng.integers(0, 32, tokens)] * rng.choice([-1, 1], (tokens, 1))
    if kind == "two":  # a few tokens again and again
        x = x[rng.integers(0, 2, tokens)]
    return x


def assert_nothing_beyond(lm, lengths, x: np.ndarray, eps: float) -> None:
    """No token beyond its head's scope gets more than ``eps``, and all of them together what that adds up to."""
    apart = np.arange(len(x))[:, None] - np.arange(len(x))
    for layer, heads in zip(lm.params.layers, lengths, strict=True):
        for query, (weights, slope) in enumerate(zip(attention_weights(layer, x), bloom_oracle.slopes(4), strict=True)):
            beyond = np.where(apart >= heads[query // 2], weights, 0)
            assert beyond.max() <= eps
            # The bound falls by exp(-slope) with each further token: a geometric series.
            assert beyond.sum(axis=1).max() <= eps / (1 - math.exp(-slope))


KINDS = st.sampled_from(["normal", "spikes", "two"])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.02, 0.08, 0.3]),
    kind=KINDS,
    eps=st.sampled_from([0.1, 0.001]),
)
def test_beyond_a_safe_scope_no_token_gets_more_than_eps(seed, scale, kind, eps):
    lm = model(seed % 3, scale)
    lengths = scope_lengths(alibi_scopes(lm), "safe", eps, lm.config.attention_scale)
    assert_nothing_beyond(lm, lengths, hidden_states(kind, seed), eps)


@functools.cache
def plain_model(scale: float):
    """What the paper's theorem supposes: the norm's weights are equal, and nothing has a bias."""
    lm = toys.tiny_model(**SHAPE)
    for layer in lm.params.layers:
        factor = np.ones(layer.config.group_size + 2)
        factor[:-1] = scale
        layer.qkv[...] = (logical(layer.qkv) * factor[:, None]).reshape(layer.qkv.shape)
        layer.qkv_bias[...] = jax.numpy.zeros_like(layer.qkv_bias[...])
        layer.input_norm.weight[...] = jax.numpy.full((32,), 0.7)
        layer.input_norm.bias[...] = jax.numpy.zeros((32,))
    return lm


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.02, 0.08, 0.3]),
    kind=KINDS,
    eps=st.sampled_from([0.1, 0.001]),
)
def test_beyond_a_scaled_scope_no_token_gets_more_than_eps(seed, scale, kind, eps):
    """Of every input where the theorem's suppositions hold; of inputs like a model's own in general."""
    lm = plain_model(scale)
    lengths = scope_lengths(alibi_scopes(lm), "scaled", eps, lm.config.attention_scale)
    assert_nothing_beyond(lm, lengths, hidden_states(kind, seed), eps)
    lm = model(seed % 3, scale)
    lengths = scope_lengths(alibi_scopes(lm), "scaled", eps, lm.config.attention_scale)
    assert_nothing_beyond(lm, lengths, hidden_states("normal", seed), eps)


def test_scaled_is_the_default_and_shorter_than_the_papers_letter():
    profile, config = alibi_scopes(model()), model().config
    lengths = {
        bound: np.array(scope_lengths(profile, bound, 0.001, config.attention_scale)) for bound in ("scaled", "paper")
    }
    assert (lengths["scaled"] < lengths["paper"]).all()
    for policy, bound in ((RazorAttention(profile=profile), "scaled"), (parse("razor:bound=paper"), "paper")):
        ring = dataclasses.replace(policy, profile=profile).others(config)
        np.testing.assert_array_equal(ring.lengths, np.minimum(lengths[bound], config.max_position))


def test_some_scopes_are_shorter_than_a_prompt():
    """Without which the tests here would promise nothing."""
    lengths = scope_lengths(alibi_scopes(model()), "safe", 0.001, 1 / math.sqrt(8))
    assert min(min(heads) for heads in lengths) < 200


TEXT = "Some of this is worth remembering and most of it is not. " * 7  # 399 tokens of a byte


@pytest.mark.slow
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
    lengths = scope_lengths(policy.profile, "safe", 1e-6, lm.config.attention_scale)
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
    RazorAttention(profile=alibi_scopes(lm), bound="safe", eps=0.01).check(lm.config)
    for option, value in dict(
        inner=LagKV(), ratio=0.5, budget=50, heads="0.1", induction_share=0.2, echo_share=0.1, share_of="kv",
        sink=2, threshold=100, compression=2.0, compensation=False,
    ).items():  # fmt: skip
        with pytest.raises(UsageError, match=f"own scope.*leave out {option}"):
            RazorAttention(profile=alibi_scopes(lm), **{option: value}).check(lm.config)
