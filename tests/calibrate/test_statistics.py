"""Statistics of queries and keys over texts: against NumPy, through their file, and what policies do with them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import toys
from support.scorers import random_statistics, with_statistics

import kvjax
from kvjax.calibrate import load_profile, save_profile, text_statistics
from kvjax.errors import UsageError
from kvjax.model.rope import angles, rotate
from kvjax.policies import AdaptiveHeads, ExpectedAttention, KeyDiff
from kvjax.policies.profile import lower_roots

TEXT = "The harbour was built in 1886. Its light is green, and its keeper grew roses until the war began. "
TEXTS = [TEXT * 3, TEXT[:50]]


def first_layer(lm, piece: str) -> tuple[np.ndarray, np.ndarray]:
    """Queries before rotary embedding [T, H, G, D], and keys after it [T, H, D], of layer 0: they need no attention."""
    tokens = jnp.asarray([lm.tokenizer.encode(piece)])
    q, k, _ = lm.params.layers[0].project(lm.params.embed(tokens))
    count = tokens.shape[1]
    cos, sin = angles(lm.config, jnp.arange(count)[None], jnp.asarray([count]))
    k = rotate(k[0], cos[0, :, None], sin[0, :, None])
    return np.asarray(q[0], np.float64), np.asarray(k, np.float64)


def test_queries_and_keys_of_every_text(tmp_path):
    lm = toys.tiny_model()
    profile = text_statistics(lm, TEXTS, tokens=60, sink=3)
    pieces = [text[i : i + 60] for text in TEXTS for i in range(0, len(text), 60)]
    assert profile.pieces == len(pieces) == 6 and profile.tokens == sum(map(len, TEXTS))
    read = [first_layer(lm, piece) for piece in pieces]
    queries = np.concatenate([q[3:] for q, _ in read])
    keys = np.concatenate([k / np.linalg.norm(k, axis=-1, keepdims=True) for _, k in read])
    mean, covariance = profile.queries(0)
    np.testing.assert_allclose(mean, queries.mean(axis=0), atol=1e-5)
    centred = queries - queries.mean(axis=0)
    wanted = np.einsum("nhgd,nhge->hgde", centred, centred) / len(queries)
    np.testing.assert_allclose(covariance, wanted, atol=2e-3 * np.abs(wanted).max())
    np.testing.assert_allclose(profile.anchor(0), keys.mean(axis=0), atol=1e-5)
    assert np.abs(profile.anchor(1) - profile.anchor(0)).max() > 0.01  # every layer has its own
    save_profile(profile, tmp_path / "toy.yaml")
    assert load_profile(tmp_path / "toy.yaml") == profile


def test_a_large_mean_leaves_the_covariance_as_it_is():
    """Sums of squares in float32 would lose it: here the mean's square is four million times the covariance."""
    lm = toys.tiny_model(qkv_bias=True)
    layer = lm.params.layers[0]
    mean, covariance = text_statistics(lm, TEXTS, tokens=60).queries(0)
    shift = 2000 * float(np.sqrt(covariance.max()))
    layer.qkv_bias[...] = layer.qkv_bias[...] + shift  # of queries, keys and values alike
    far, other = text_statistics(lm, TEXTS, tokens=60).queries(0)
    np.testing.assert_allclose(far - mean, shift, rtol=1e-3)
    np.testing.assert_allclose(other, covariance, atol=0.01 * covariance.max())


def test_the_seed_draws_pieces():
    lm = toys.tiny_model()
    drawn = [text_statistics(lm, [TEXT * 4], tokens=40, most=2, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != dataclasses.replace(drawn[2], seed=0)
    assert drawn[0].tokens == 80


@pytest.mark.parametrize("rank", [0, 2, 6])
def test_roots_of_covariances(rank):
    rng = np.random.default_rng(0)
    factor = rng.standard_normal((3, 6, rank))
    covariance = factor @ factor.swapaxes(1, 2)
    rows, columns = np.tril_indices(6)
    root = np.zeros((3, 6, 6))
    root[:, rows, columns] = lower_roots(covariance)
    np.testing.assert_allclose(root @ root.swapaxes(1, 2), covariance, atol=1e-12)


@pytest.mark.parametrize(
    "policy",
    [KeyDiff(ratio=0.25), ExpectedAttention(ratio=0.25), AdaptiveHeads(ratio=0.25, inner=ExpectedAttention())],
    ids=str,
)
def test_policies_of_texts_through_prompts_turns_and_disk(policy, tmp_path):
    lm = toys.tiny_model()
    policy = with_statistics(policy, lm.config)
    output = kvjax.generate(lm, [65] * 300, policy=policy, storage="int8", max_new_tokens=1)
    assert np.mean(output.stats.retained) == 75
    planned = kvjax.plan(lm, prompt_tokens=300, policy=policy, storage="int8", max_new_tokens=1)
    assert planned.cache_bytes == output.cache.nbytes
    kvjax.save_cache(tmp_path / "cache", output.cache, lm)
    loaded = kvjax.load_cache(tmp_path / "cache", lm)
    assert loaded.policy == output.cache.policy
    answers = [kvjax.generate(lm, TEXT, cache=cache, max_new_tokens=4).tokens for cache in (output.cache, loaded)]
    assert answers[0] == answers[1]


def test_the_file_is_the_policys(tmp_path):
    lm = toys.tiny_model()
    path = tmp_path / "toy.yaml"
    save_profile(text_statistics(lm, TEXTS, tokens=60), path)
    prompt = TEXT * 3
    for name in ("keydiff", "expected_attention"):
        said = [
            kvjax.generate(lm, prompt, policy=policy, max_new_tokens=3, logprobs=True).logprobs
            for policy in (f"{name}:budget=24,profile={path}", f"{name}:budget=24")
        ]
        assert said[0] != said[1]
    assert kvjax.policies.parse(f"adaptive:ratio=0.5,inner=expected_attention(profile={path})").inner.profile.tokens


def test_what_has_no_statistics_is_one_sentence(tmp_path):
    lm = toys.tiny_model()
    other = random_statistics(dataclasses.replace(lm.config, num_layers=3))
    for policy in (KeyDiff(profile=other), ExpectedAttention(profile=other)):
        with pytest.raises(UsageError, match=r"belongs to another model.*kvjax calibrate statistics"):
            kvjax.generate(lm, TEXT, policy=policy)
        with pytest.raises(UsageError, match="a policy within another one"):
            kvjax.Razor(inner=policy)
    for bad in (lambda: KeyDiff(profile=7), lambda: ExpectedAttention(profile=7)):
        with pytest.raises(UsageError, match="profile is 7"):
            bad()
    own = random_statistics(lm.config)
    for wrong in ({"roots": own.means}, {"means": ("no text",) * 2}, {"anchors": own.anchors[:1]}):
        with pytest.raises(UsageError, match="packed numbers"):
            dataclasses.replace(own, **wrong)
    for texts, said in (([""], "no tokens to read"), (TEXT, "are one text"), (["abc"], "first 4 tokens")):
        with pytest.raises(UsageError, match=said):
            text_statistics(lm, texts)
