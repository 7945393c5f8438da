"""Scores of retrieval heads against the definition, written out with whole attention matrices in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from kvjax.calibrate import retrieval
from kvjax.calibrate.retrieval import first_token, random_tokens, retrieval_heads
from kvjax.errors import UsageError
from kvjax.model.params import logical
from kvjax.model.rope import token_angles
from kvjax.policies.head_choice import protected_heads
from kvjax.policies.profile_files import load_profile
from kvjax.runtime import layer_forward

# --- the oracle: a dense forward pass, then the definition token by token ---------------------------------------------


def attention_matrices(lm, ids: np.ndarray) -> list[np.ndarray]:
    """[query head, T, T] attention of every layer, from the weights as they are written in the model's docstring."""
    config, params = lm.config, lm.params
    weights = [{name: np.asarray(value, np.float64) for name, value in _arrays(layer)} for layer in params.layers]
    x = np.asarray(params.table, np.float64)[ids]  # tied embeddings
    time = np.arange(len(ids))
    frequency = config.rope.theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    phasor = np.exp(1j * time[:, None] * frequency)

    def norm(x, weight):
        return weight * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.rms_norm_eps)

    def with_rope(x):
        half = config.head_dim // 2
        y = (x[..., :half] + 1j * x[..., half:]) * phasor
        return np.concatenate([y.real, y.imag], axis=-1)

    matrices = []
    for w in weights:
        mixed = np.einsum("tm,mhgd->hgtd", norm(x, w["input_norm"]), w["qkv"])
        layer = []
        outputs = np.zeros_like(x)
        for head in range(config.num_kv_heads):
            key, value = with_rope(mixed[head, -2]), mixed[head, -1]
            for member in range(config.group_size):
                scores = with_rope(mixed[head, member]) @ key.T / np.sqrt(config.head_dim)
                scores[time[:, None] < time] = -np.inf
                matrix = np.exp(scores - scores.max(axis=1, keepdims=True))
                matrix /= matrix.sum(axis=1, keepdims=True)
                layer.append(matrix)
                outputs += matrix @ value @ w["out"][head, member]
        x = x + outputs
        halves = np.einsum("tm,mbcf->tbcf", norm(x, w["post_attention_norm"]), w["gate_up"])
        gate, up = (halves[:, :, half].reshape(len(x), -1) for half in (0, 1))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"]
        matrices.append(np.stack(layer))
    return matrices


def _arrays(layer):
    for name in ("qkv", "out", "gate_up", "down"):
        yield name, logical(getattr(layer, name))
    for name in ("input_norm", "post_attention_norm"):
        yield name, getattr(layer, name).weight[...]


def by_definition(matrix: np.ndarray, ids: np.ndarray, period: int) -> tuple[float, float]:
    """Attention to earlier positions of the same token, and to the tokens after those; from the second repetition."""
    echo, induction = [], []
    for p in range(1 + period, len(ids)):
        same = [j for j in range(1, p) if ids[j] == ids[p]]
        echo.append(sum(matrix[p, j] for j in same))
        induction.append(sum(matrix[p, j + 1] for j in same))
    return float(np.mean(echo)), float(np.mean(induction))


@pytest.mark.parametrize("heads, repeats, tokens", [(4, 4, None), (2, 3, 30)])
def test_scores_are_the_definition(heads, repeats, tokens):
    lm = toys.tiny_model(num_heads=heads)
    profile = retrieval_heads(lm, tokens=tokens, repeats=repeats, seed=5)
    period = (512 - 1) // 4 if tokens is None else tokens
    assert (profile.tokens, profile.repeats, profile.seed) == (period, repeats, 5)
    ids = np.concatenate([first_token(lm), *[random_tokens(lm, period, 5)] * repeats])
    for layer, matrices in enumerate(attention_matrices(lm, ids)):
        wanted = [by_definition(matrix, ids, period) for matrix in matrices]
        np.testing.assert_allclose(profile.echo[layer], [echo for echo, _ in wanted], atol=2e-6)
        np.testing.assert_allclose(profile.induction[layer], [induction for _, induction in wanted], atol=2e-6)


def test_the_tokens_are_different_ordinary_and_decided_by_the_seed():
    lm = toys.tiny_model()
    first = random_tokens(lm, 200, 0)
    assert len(set(first.tolist())) == 200
    assert not set(first.tolist()) & set(lm.tokenizer.special_ids)
    np.testing.assert_array_equal(first, random_tokens(lm, 200, 0))
    assert (first != random_tokens(lm, 200, 1)).any()
    many = random_tokens(lm, 300, 0)
    assert len(many) == 300 and len(set(many.tolist())) == 256


def test_the_same_seed_gives_the_same_profile_and_progress_counts_layers():
    lm, said = toys.tiny_model(), []
    profiles = [retrieval_heads(lm, tokens=40, seed=3, progress=lambda *x: said.append(x)) for _ in range(2)]
    assert profiles[0] == profiles[1] and hash(profiles[0]) == hash(profiles[1])
    assert said == [(1, 2), (2, 2)] * 2
    assert profiles[0] != retrieval_heads(lm, tokens=40, seed=4)


def test_memory_is_one_layers_keys_and_values_and_never_a_matrix():
    """At 4,097 tokens one head's matrix would be 67 MB; the program may take a tenth of it for all heads."""
    lm = toys.tiny_model()
    size = 4352
    x = jax.ShapeDtypeStruct((1, size, 32), jnp.float32)
    count = jax.ShapeDtypeStruct((1,), jnp.int32)
    rope = jax.eval_shape(lambda: token_angles(lm.config, jnp.arange(size)[None], jnp.full((1,), size)))
    observer = retrieval.RepetitionScores(lm.config, period=1024, repeats=4)
    lowered = layer_forward.read_one.lower(lm.params.layers[0], x, rope, count, observer)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < size * size * 4 / 10


@pytest.mark.parametrize(
    "bad, said", [(dict(tokens=1), "at least 2"), (dict(tokens=128), "at most 127"), (dict(repeats=1), "repeats"),
                  (dict(seed=-1), "seed"), (dict(repeats=300), "does not hold")],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(bad, said):
    with pytest.raises(UsageError, match=said) as error:
        retrieval_heads(toys.tiny_model(), **bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


@pytest.mark.slow
def test_the_packaged_profile_was_made_this_way(default_model):
    """A short calibration of the real model agrees with the packaged one about the strongest heads."""
    from kvjax.policies.profile import HeadProfile
    from kvjax.policies.profile_files import packaged

    kept = packaged(HeadProfile, default_model.config)
    assert kept is not None and kept.tokens == 2047 and kept.repeats == 4
    short = retrieval_heads(default_model, tokens=128, seed=7)

    def strongest(profile, name, count):
        table = np.asarray(getattr(profile, name))
        return {tuple(np.unravel_index(i, table.shape)) for i in np.argsort(-table, axis=None)[:count]}

    assert len(strongest(short, "induction", 8) & strongest(kept, "induction", 12)) >= 6
    assert len(strongest(short, "echo", 2) & strongest(kept, "echo", 4)) >= 1
    assert sum(map(len, protected_heads(kept, 0.14, 0.01, "query"))) == 22
    assert load_profile(kept.source) == kept
