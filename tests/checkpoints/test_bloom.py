"""BLOOM's layout: its configuration, where its weights land, its slopes, and what is refused by name."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support import bloom_oracle, gguf_files, tiny

from kvjax.checkpoints.families import FAMILIES
from kvjax.checkpoints.load import load
from kvjax.errors import UsageError, WeightsError
from kvjax.model.alibi import slopes
from kvjax.model.config import ModelConfig
from kvjax.model.params import logical

_TIED, _UNTIED = "bloom_3_heads", "bloom_untied_odd_head_dim"


@pytest.fixture
def folder(tmp_path):
    """A tied bloom in Hugging Face's form."""
    return gguf_files.write_folder(gguf_files.case(_TIED), tmp_path / "model")


def change(folder, edit) -> None:
    """Edit the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    edited = edit(tensors)
    save_file(tensors if edited is None else edited, folder / "model.safetensors")


def from_hf(**changes) -> ModelConfig:
    config = gguf_files.case(_TIED).config | changes
    return FAMILIES["bloom"].from_hf({k: v for k, v in config.items() if v is not None}, "config.json")


def from_gguf(tied=True, **keys) -> ModelConfig:
    metadata = {k: v for k, v in (gguf_files.metadata(gguf_files.case(_TIED)) | keys).items() if v is not None}
    shapes = {"token_embd.weight": (gguf_files.VOCAB, 48)} | ({} if tied else {"output.weight": (gguf_files.VOCAB, 48)})
    return FAMILIES["bloom"].from_gguf(metadata, shapes, {}, "m.gguf")


@given(heads=st.integers(1, 200))
def test_slopes_are_the_papers(heads):
    ours = slopes(_config(num_heads=heads, num_kv_heads=heads))
    assert ours.shape == (heads, 1) and ours.dtype == np.float32
    np.testing.assert_allclose(ours[:, 0], bloom_oracle.slopes(heads), rtol=1e-6)


def test_slopes_by_hand_and_by_group():
    # Section 3 of the paper: 8 heads have 1/2, 1/4 .. 1/256; six heads have four heads' slopes, then 1st, 3rd of eight.
    eight = [2.0**-i for i in range(1, 9)]
    np.testing.assert_array_equal(slopes(_config(num_heads=8, num_kv_heads=2)), np.reshape(eight, (2, 4)))
    six = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    np.testing.assert_array_equal(slopes(_config(num_heads=6, num_kv_heads=6))[:, 0], six)


def _config(**changes) -> ModelConfig:
    values = dict(
        family="bloom",
        vocab_size=10,
        hidden_size=12,
        intermediate_size=48,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=6,
        max_position=64,
        positional="alibi",
    )
    return ModelConfig(**(values | changes))


def test_every_field():
    c = from_hf(layer_norm_epsilon=1e-3)
    assert (c.family, c.vocab_size, c.hidden_size, c.intermediate_size) == ("bloom", gguf_files.VOCAB, 48, 192)
    assert (c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.max_position) == (2, 3, 3, 16, 64)
    assert (c.positional, c.norm, c.mlp, c.embedding_norm, c.rms_norm_eps) == ("alibi", "layer", "gelu", True, 1e-3)
    assert (c.qkv_bias, c.output_bias, c.mlp_bias, c.tie_embeddings) == (True, True, True, True)


def test_absent_keys_have_transformers_defaults_and_sizes_have_old_names():
    old = {"model_type": "bloom", "vocab_size": 9, "n_embed": 48, "n_layer": 2, "n_head": 6, "n_inner": None}
    c = FAMILIES["bloom"].from_hf(old, "x")
    assert (c.hidden_size, c.num_layers, c.num_heads, c.intermediate_size) == (48, 2, 6, 192)
    assert (c.max_position, c.rms_norm_eps, c.tie_embeddings) == (2048, 1e-5, True)


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_keys(tied):
    from_file = from_gguf(tied, **{"bloom.attention.layer_norm_epsilon": 1e-5})
    assert from_file == from_hf(tie_word_embeddings=tied)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ({"quantization_config": {"bits": 8}}, "quantised"),
        ({"n_inner": 100}, "100 as its n_inner; a bloom's is 192"),
        ({"hidden_size": 50}, "3 heads in 50 channels"),
        ({"hidden_size": None}, "None as its hidden_size"),
        ({"num_attention_heads": 0}, "0 as its num_attention_heads"),
        ({"vocab_size": "48"}, "'48' as its vocab_size"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes, sentence):
    with pytest.raises(WeightsError) as caught:
        from_hf(**changes)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"bloom.block_count": None}, "lacks the key bloom.block_count"),
        ({"bloom.attention.head_count_kv": 1}, "shares keys among heads"),
    ],
)
def test_gguf_keys_that_cannot_be_run(keys, sentence):
    with pytest.raises(WeightsError, match=sentence):
        from_gguf(**keys)


def test_a_choice_that_is_not_there_is_refused():
    for name, sentence in (
        ("positional", "choose 'rope', 'alibi' or 'none'"),
        ("norm", "choose 'rms' or 'layer'"),
        ("norm_order", "choose 'pre', 'post' or 'both'"),
        ("mlp", "choose 'gated_silu', 'gated_gelu', 'gelu' or 'gelu_exact'"),
    ):
        with pytest.raises(UsageError, match=rf"{name} is 'relu'; {sentence}"):
            _config(**{name: "relu"})
    with pytest.raises(UsageError, match="rotary embedding needs an even number"):
        _config(positional="rope", head_dim=5)
    with pytest.raises(UsageError, match="at least 1 channel"):
        _config(head_dim=0)


@pytest.mark.parametrize("name", [_TIED, _UNTIED])
def test_places(tmp_path, name):
    case = gguf_files.case(name)
    tensors, lm = gguf_files.weights(case), load(gguf_files.write_folder(case, tmp_path / "m"), dtype="float32")
    heads, dim, params = lm.config.num_heads, lm.config.head_dim, lm.params
    for index, layer in enumerate(params.layers):
        block = f"transformer.h.{index}."
        fused = tensors[f"{block}self_attention.query_key_value.weight"]
        bias = tensors[f"{block}self_attention.query_key_value.bias"]
        for head in range(heads):
            for part in range(3):  # a query, a key, a value
                at = (head * 3 + part) * dim
                np.testing.assert_array_equal(logical(layer.qkv)[:, head, part], fused[at : at + dim].T)
                np.testing.assert_array_equal(logical(layer.qkv_bias)[head, part], bias[at : at + dim])
            dense = tensors[f"{block}self_attention.dense.weight"][:, head * dim : (head + 1) * dim]
            np.testing.assert_array_equal(logical(layer.out)[head, 0], dense.T)
        np.testing.assert_array_equal(logical(layer.up), tensors[f"{block}mlp.dense_h_to_4h.weight"].T)
        np.testing.assert_array_equal(layer.down[...], tensors[f"{block}mlp.dense_4h_to_h.weight"].T)
        vectors = {
            "self_attention.dense.bias": layer.out_bias,
            "mlp.dense_h_to_4h.bias": layer.up_bias,
            "mlp.dense_4h_to_h.bias": layer.down_bias,
            "input_layernorm.weight": layer.input_norm.weight,
            "input_layernorm.bias": layer.input_norm.bias,
            "post_attention_layernorm.weight": layer.post_attention_norm.weight,
            "post_attention_layernorm.bias": layer.post_attention_norm.bias,
        }
        for hf_name, param in vectors.items():
            np.testing.assert_array_equal(param[...], tensors[block + hf_name])
    table = tensors["transformer.word_embeddings.weight"]
    np.testing.assert_array_equal(logical(params.head), tensors.get("lm_head.weight", table).T)
    np.testing.assert_array_equal(table.T if params.config.tie_embeddings else params.embedding[...].T, table.T)
    for hf_name, norm in (("word_embeddings_layernorm", params.embedding_norm), ("ln_f", params.norm)):
        np.testing.assert_array_equal(norm.weight[...], tensors[f"transformer.{hf_name}.weight"])
        np.testing.assert_array_equal(norm.bias[...], tensors[f"transformer.{hf_name}.bias"])


def assert_same(one, other) -> None:
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", [_TIED, _UNTIED])
def test_gguf_equals_safetensors(tmp_path, name):
    case = gguf_files.case(name)
    ours = load(gguf_files.write_case(case, tmp_path / "m.gguf"), dtype="float32")
    theirs = load(gguf_files.write_folder(case, tmp_path / "m"), dtype="float32")
    assert ours.config.rms_norm_eps == pytest.approx(theirs.config.rms_norm_eps)
    assert_same(ours, theirs)


def test_names_of_a_checkpoint_saved_without_its_head(folder):
    whole = load(folder, dtype="float32")
    change(folder, lambda tensors: {k.removeprefix("transformer."): v for k, v in tensors.items()})
    assert_same(whole, load(folder, dtype="float32"))
    change(folder, lambda tensors: {k: v for k, v in tensors.items() if k != "h.1.mlp.dense_4h_to_h.bias"})
    with pytest.raises(WeightsError, match=r"lacks the weight 'h\.1\.mlp\.dense_4h_to_h\.bias'"):
        load(folder)


def test_weights_that_do_not_fit_are_named(folder):
    name = "transformer.h.0.self_attention.query_key_value.weight"
    change(folder, lambda tensors: tensors | {name: np.zeros((144, 47), np.float32)})
    with pytest.raises(WeightsError, match=r"query_key_value.weight' with shape \[144, 47\].*\[144, 48\]"):
        load(folder)
    change(folder, lambda tensors: {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(WeightsError, match=r"lacks the weight 'transformer.h.0.self_attention.query_key_value.weight'"):
        load(folder)


def test_left_over_weight_and_other_head_are_named(folder):
    table = load_file(folder / "model.safetensors")["transformer.word_embeddings.weight"]
    change(folder, lambda tensors: tensors | {"lm_head.weight": table.copy()})
    load(folder)
    change(folder, lambda tensors: tensors | {"lm_head.weight": table + 1})
    with pytest.raises(WeightsError, match=r"also holds a different 'lm_head.weight'"):
        load(folder)
    more = {"lm_head.weight": table.copy(), "transformer.h.0.mlp.gate.weight": np.ones(3, np.float32)}
    change(folder, lambda tensors: tensors | more)
    with pytest.raises(WeightsError, match=r"'transformer.h.0.mlp.gate.weight', which a bloom model does not have"):
        load(folder)


def test_a_setting_of_the_wrong_kind_is_the_files_fault(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seq_length": "long"}))
    with pytest.raises(WeightsError, match=r"a setting is of the wrong kind"):
        load(folder)


def test_golden_cases_cover_both_rules_of_slopes():
    cases = [case.config for case in tiny.CASES if case.config["model_type"] == "bloom"]
    heads = {c["num_attention_heads"] or c["n_head"] for c in cases}
    assert {2, 3, 6, 8, 12} <= heads
