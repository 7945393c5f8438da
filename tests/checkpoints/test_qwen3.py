"""Qwen3: norms of queries and keys, against a forward pass in NumPy and from either kind of file."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import gguf_files
from support.recall.oracle import forward

from kvjax.checkpoints.families import FAMILIES, Family, register
from kvjax.checkpoints.load import load
from kvjax.errors import UsageError, WeightsError
from kvjax.model.config import ModelConfig
from kvjax.runtime.prefill import logits_of

CASE = gguf_files.case("llama_gqa", model_type="qwen3", head_dim=12)


def test_logits_equal_the_references(tmp_path):
    folder = gguf_files.write_folder(CASE, tmp_path / "m")
    lm, tokens = load(folder, dtype="float32"), CASE.tokens(40)
    want, _ = forward(folder, tokens)
    found = logits_of(lm.params, jnp.asarray(tokens)[None], jnp.array([40]))[0]
    np.testing.assert_allclose(found, want, atol=1e-4 * want.std())


def test_gguf_equals_safetensors(tmp_path):
    ours = load(gguf_files.write_case(CASE, tmp_path / "m.gguf"), dtype="float32")
    theirs = load(gguf_files.write_folder(CASE, tmp_path / "m"), dtype="float32")
    assert ours.config.qk_norm and theirs.config.qk_norm
    norm = gguf_files.weights(CASE)["model.layers.1.self_attn.k_norm.weight"]
    np.testing.assert_array_equal(ours.params.layers[1].k_norm.weight[...], norm)
    for one, other in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_absent_keys_have_transformers_defaults():
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "model_type")
    c = FAMILIES["qwen3"].from_hf({key: CASE.config[key] for key in keys}, "x")
    assert (c.head_dim, c.max_position, c.rms_norm_eps) == (128, 32768, 1e-6)
    assert not (c.qkv_bias or c.output_bias or c.mlp_bias or c.tie_embeddings)


def test_layers_from_some_on_may_have_a_window():
    slides = CASE.config | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    layers = CASE.config["num_hidden_layers"]
    assert FAMILIES["qwen3"].from_hf(slides, "x").windows == (None, *[16] * (layers - 1))
    for idle in ({"sliding_window": 4096}, {"max_window_layers": layers}, {"use_sliding_window": False}):
        assert FAMILIES["qwen3"].from_hf(slides | idle, "x").windows == ()


def test_a_checkpoint_without_the_norms_is_refused(tmp_path):
    plain = gguf_files.case("llama_gqa", head_dim=12)
    folder = gguf_files.write_folder(plain, tmp_path / "m")
    config = (folder / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "qwen3"')
    (folder / "config.json").write_text(config)
    with pytest.raises(WeightsError, match=r"lacks the weight 'model.layers.0.self_attn.q_norm.weight'"):
        load(folder)


def test_norms_of_queries_are_for_rotary_models():
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"), 8)
    with pytest.raises(UsageError, match=r"qk_norm is for models with rotary embedding"):
        ModelConfig("x", **sizes, num_kv_heads=8, head_dim=4, max_position=9, positional="alibi", qk_norm=True)


def test_a_registered_name_is_taken(monkeypatch):
    monkeypatch.setattr("kvjax.checkpoints.families.FAMILIES", dict(FAMILIES))
    known = FAMILIES["qwen3"]
    register("qwen3", known)
    with pytest.raises(UsageError, match=r"'qwen3' already has a family"):
        register("qwen3", Family(known.from_hf, None, known.weights))
