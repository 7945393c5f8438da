"""Configurations: what every family and every rotary scaling is mapped to, and what is refused by name."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from support import family_cases, gguf_files, tiny

from kvjax.checkpoints.families import FAMILIES, family
from kvjax.checkpoints.load import load
from kvjax.errors import KvjaxError, WeightsError
from kvjax.model.config import RopeConfig
from kvjax.model.rope import frequencies


def from_hf(**changes):
    config = gguf_files.case("llama_gqa").config | changes
    return family(config["model_type"], "config.json").from_hf(config, "config.json")


def from_gguf(name="llama_gqa", factors=None, **keys):
    metadata = gguf_files.metadata(gguf_files.case(name)) | keys
    metadata["general.architecture"] = "qwen2" if name.startswith("qwen2") else "llama"
    metadata = {key: value for key, value in metadata.items() if value is not None}
    make = family(metadata["general.architecture"], "m.gguf").from_gguf
    return make(metadata, {"token_embd.weight": (gguf_files.VOCAB, 32)}, factors or {}, "m.gguf")


def test_every_field_of_a_llama():
    c = from_hf(rms_norm_eps=1e-3, head_dim=12, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert (c.family, c.vocab_size, c.hidden_size, c.intermediate_size) == ("llama", gguf_files.VOCAB, 32, 56)
    assert (c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.max_position) == (2, 4, 2, 12, 64)
    assert (c.rms_norm_eps, c.rope) == (1e-3, RopeConfig(theta=10000.0))
    assert (c.qkv_bias, c.output_bias, c.mlp_bias, c.tie_embeddings) == (True, True, True, True)


def test_names_of_counts_of_experts_before_and_since_transformers_5():
    for name in ("num_experts", "num_local_experts"):
        assert from_hf(model_type="qwen3_moe", **{name: 16}).experts.count == 16


def test_absent_keys_have_transformers_defaults():
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "model_type")
    bare = {key: gguf_files.case("llama_gqa").config[key] for key in keys}
    c = FAMILIES["llama"].from_hf(bare, "x")
    assert (c.num_kv_heads, c.head_dim, c.max_position, c.rms_norm_eps) == (4, 8, 2048, 1e-6)
    assert not (c.qkv_bias or c.mlp_bias or c.tie_embeddings)
    assert c.rope == RopeConfig()
    assert FAMILIES["qwen2"].from_hf(bare | {"model_type": "qwen2"}, "x").max_position == 32768


def test_absent_counts_of_kv_heads_are_the_familys():
    for name, count in (("llama", 16), ("mistral", 8), ("ministral", 8), ("mixtral", 8), ("qwen3_moe", 4)):
        config = {**gguf_files.case("llama_gqa").config, "num_attention_heads": 16, "hidden_size": 128}
        config |= {"model_type": name, "head_dim": 8}
        del config["num_key_value_heads"]
        assert FAMILIES[name].from_hf(config, "x").num_kv_heads == count, name
        assert FAMILIES[name].from_hf({**config, "num_key_value_heads": None}, "x").num_kv_heads == 16, name


def test_command_r_has_the_context_that_it_was_trained_on():
    """Its first files say 8192 positions for transformers, and 131072 tokens for everybody else."""
    first = {"model_type": "cohere", "max_position_embeddings": 8192, "hidden_act": "silu"}
    assert from_hf(**first).max_position == 8192
    assert from_hf(**first, model_max_length=131072).max_position == 131072
    with pytest.raises(WeightsError, match="'long' as its model_max_length"):
        from_hf(**first, model_max_length="long")


def test_a_context_is_what_dynamic_and_yarn_scaling_make_of_it():
    """As Qwen's model cards have users add YaRN to a file; elsewhere the file says the scaled context itself."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert from_hf(rope_scaling=yarn).max_position == 256
    assert from_hf(rope_scaling=yarn, max_position_embeddings=80).max_position == 256
    assert from_hf(rope_scaling=yarn, max_position_embeddings=300).max_position == 300
    dynamic = from_hf(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert (dynamic.max_position, dynamic.rope.original_max_position) == (128, 64)
    assert from_hf(rope_scaling={"type": "linear", "factor": 2.0}).max_position == 64
    # A window at the context before scaling slides beyond it.
    window = {"model_type": "mistral", "sliding_window": 64}
    assert from_hf(**window).windows == ()
    assert from_hf(**window, rope_scaling=yarn).windows == (64, 64)
    keys = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    for original in (64, 16):
        keys["llama.rope.scaling.original_context_length"] = original
        assert from_gguf(**keys).max_position == 4 * original


@pytest.mark.parametrize("kind", ["yarn", "dynamic"])
@pytest.mark.parametrize("factor", [1e308, float("inf"), float("-inf"), float("nan"), 10**400])
def test_a_factor_that_no_context_could_have_is_refused(kind, factor):
    for table in ({"factor": factor}, {"factor": 2.0, "original_max_position_embeddings": factor}):
        if kind == "dynamic" and len(table) > 1:
            continue  # its own key is not read
        with pytest.raises(KvjaxError):
            from_hf(rope_scaling={"type": kind, **table})
    with pytest.raises(KvjaxError):
        from_gguf(**{"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": factor})


def test_windows_of_smollm3_are_of_its_layers_without_rotary_embedding():
    given = {"model_type": "smollm3", "num_hidden_layers": 8, "max_position_embeddings": 64, "sliding_window": 16}
    slides = from_hf(**given, use_sliding_window=True)
    assert [i for i in range(8) if slides.layer(i).window] == list(slides.no_rotary_layers) == [3, 7]
    assert slides.layer(3).window == 16
    assert not any(from_hf(**given).layer(i).window for i in range(8))
    kinds = ["sliding_attention"] + ["full_attention"] * 7
    said = from_hf(**given, use_sliding_window=True, layer_types=kinds)
    assert [i for i in range(8) if said.layer(i).window] == [0], "the file says it itself"


def test_activations_by_the_names_that_published_models_give():
    neox = {**gguf_files.case("llama_gqa").config, "model_type": "gpt_neox"}
    assert FAMILIES["gpt_neox"].from_hf({**neox, "hidden_act": "gelu_fast"}, "x").mlp == "gelu"  # GPT-NeoX-20B
    falcon = {"vocab_size": 272, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    falcon |= {"model_type": "falcon"}
    assert FAMILIES["falcon"].from_hf(falcon, "x").mlp == "gelu_exact"
    assert FAMILIES["falcon"].from_hf({**falcon, "activation": "gelu_new"}, "x").mlp == "gelu"
    with pytest.raises(WeightsError, match="activation 'relu'; its family has gelu"):
        FAMILIES["falcon"].from_hf({**falcon, "activation": "relu"}, "x")


def test_phi3s_first_files_call_longrope_yarn():
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for name in ("su", "yarn", "longrope"):
        found = from_hf(model_type="phi3", rope_scaling={"type": name, **lists})
        assert found.rope == from_hf(model_type="phi3", rope_scaling={"type": "longrope", **lists}).rope
        assert found.rope.kind == "longrope"


def test_qwen2_has_biases_on_queries_keys_and_values_only():
    c = from_hf(model_type="qwen2")
    assert (c.qkv_bias, c.output_bias, c.mlp_bias) == (True, False, False)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model_type": "mamba"},
            "architecture 'mamba'",
        ),
        ({"model_type": "gpt_neox"}, "activation 'silu'; its family has gelu"),
        ({"model_type": "lama"}, "architecture 'lama', which is not supported; `kvjax models` lists those that are."),
        ({"model_type": None}, "architecture None"),
        ({"model_type": ["llama"]}, "architecture"),
        ({"vocab_size": None}, "None as its vocab_size"),
        ({"hidden_size": "32"}, "'32' as its hidden_size"),
        ({"num_attention_heads": 0}, "0 as its num_attention_heads"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "weights that are quantised (quantization_config)"),
        ({"model_type": "mistral", "sliding_window": 0}, "0 as its sliding_window"),
        ({"model_type": "mistral", "sliding_window": "8"}, "'8' as its sliding_window"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "layer_types for other than its 2 layers"),
        (
            {"model_type": "mistral", "layer_types": ["full_attention", "chunked_attention"]},
            "layers of the kind 'chunked_attention'; known are full_attention and sliding_attention",
        ),
        ({"model_type": "gemma3"}, "lacks its text_config"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": None}, "None as its query_pre_attn_scalar"),
        ({"partial_rotary_factor": 0.5}, "rotates only 0.5"),
        ({"rope_scaling": {"type": "quadratic", "factor": 2}}, "rotary scaling 'quadratic'; known are default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "linear rotary scaling and lacks its 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks its 'low_freq_factor'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0, "long_factor": [1.0]}}, "lacks its 'short_factor'"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0, "long_factor": [1.0], "short_factor": [1.0]}},
            "1 rotary divisors; heads of 8 channels need 4",
        ),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "multimodal"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}},
            "different rotary embeddings",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes, sentence):
    with pytest.raises(WeightsError) as caught:
        from_hf(**changes)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


#: What writers of quantised checkpoints call their methods.
_METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "bitsandbytes", "hqq", "aqlm", "torchao")


@pytest.mark.parametrize("method", _METHODS)
def test_quantised_weights_are_refused_by_their_methods_name(method):
    sentence = rf"are quantised by '{method}' \(quantization_config\).* give the checkpoint in float .* or a GGUF"
    with pytest.raises(WeightsError, match=sentence):
        from_hf(quantization_config={"quant_method": method, "bits": 4})


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_refuses_quantised_weights(kind):
    config = {**gguf_files.case("llama_gqa").config, "model_type": kind, "quantization_config": {"quant_method": "awq"}}
    for case in family_cases.CASES:
        if case.config["model_type"] == kind:
            config = {**case.config, "quantization_config": {"quant_method": "awq"}}
    if kind in ("bloom", "chatglm", "baichuan"):
        config |= {"hidden_act": "silu", "hidden_dropout": 0.0}
    with pytest.raises(WeightsError, match=r"quantised by 'awq'"):
        FAMILIES[kind].from_hf(config, "config.json")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "multi-head latent attention") for name in ("deepseek_v2", "deepseek_v3", "deepseek2")),
        *((name, "chunked attention") for name in ("llama4", "llama4_text")),
    ],
)
def test_architectures_that_are_refused_on_purpose_say_why(name, reason):
    with pytest.raises(WeightsError, match=rf"architecture '{name}', which is not supported: .*{reason}") as caught:
        family(name, "/home/somebody/models/of-a-usual-length/config.json")
    assert "..." not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize("name", ["ministral3", "qwen4", "gemma4", "llama5", "mistral4", "phi4", "Llama", "qwen2 "])
def test_no_other_architecture_is_offered_for_a_checkpoint(name):
    """Whoever edits the file as told would get a model that loads and answers nonsense."""
    with pytest.raises(WeightsError) as caught:
        family(name, "config.json")
    said = str(caught.value).replace(repr(name), "")
    assert "did you mean" not in said and not [known for known in FAMILIES if known in said]


_LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "3 of 2 experts"),
        ({"max_position_embeddings": -5}, "-5 as its max_position_embeddings"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": -1.0}, r"-1\.0 as its rope_theta; a number above 0 is needed"),
        ({"rope_theta": 0}, "0 as its rope_theta; a number above 0 is needed"),
        ({"rope_theta": True}, "True as its rope_theta; a number above 0 is needed"),
        ({"rope_theta": "many"}, "'many' as its rope_theta; a number above 0 is needed"),
        ({"head_dim": 0}, "0 as its head_dim; it is a whole number from 1 to"),
        ({"num_key_value_heads": 0}, "0 as its num_key_value_heads; it is a whole number from 1 to"),
        ({"max_position_embeddings": 0}, "0 as its max_position_embeddings; it is a whole number from 1 to"),
        ({"tie_word_embeddings": "false"}, "'false' as its tie_word_embeddings; true or false is needed"),
        ({"attention_bias": [1]}, r"\[1\] as its attention_bias; true or false is needed"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"the rotary scaling's factor is 0\.0"),
        ({"rope_scaling": {"type": "yarn", "factor": -4.0}}, r"the rotary scaling's factor is -4\.0"),
        ({"rope_scaling": _LLAMA3 | {"low_freq_factor": 0}}, r"low_freq_factor is 0\.0; give a number above 0"),
        ({"rope_scaling": _LLAMA3 | {"low_freq_factor": 4}}, r"high_freq_factor is 4\.0; give a number above 4"),
        ({"rope_scaling": "linear"}, "a setting is of the wrong kind"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "a setting is of the wrong kind"),
        ({"rms_norm_eps": []}, "a setting is of the wrong kind"),
    ],
)
def test_settings_of_the_wrong_kind_are_the_files_fault(tmp_path, changes, sentence):
    folder = gguf_files.write_folder(gguf_files.case("llama_gqa", **changes), tmp_path)
    with pytest.raises(WeightsError, match=sentence):
        load(folder)


def test_old_and_new_rope_keys_mean_the_same():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8}
    new = from_hf(rope_theta=None, rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, **scaling})
    old = from_hf(rope_theta=500.0, rope_scaling={"type": "yarn", **scaling})
    assert new == old
    assert new.rope == RopeConfig(theta=500.0, kind="yarn", factor=4.0, original_max_position=16, beta_fast=8.0)


def test_every_scaling_has_a_golden_case():
    kinds = set()
    for case in tiny.CASES:
        kinds.add(family(case.config["model_type"], case.name).from_hf(case.config, case.name).rope.kind)
    assert kinds == {"default", "linear", "dynamic", "yarn", "longrope", "llama3"}


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"llama.rope.freq_base": None}, RopeConfig()),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, RopeConfig()),
        ({"llama.rope.scale_linear": 4.0}, RopeConfig(kind="linear", factor=4.0)),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            RopeConfig(kind="linear", factor=2.0),
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 16,
            },
            RopeConfig(kind="yarn", factor=4.0, original_max_position=16),
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 16,
                "llama.rope.scaling.attn_factor": 0.5,
                "llama.rope.scaling.yarn_ext_factor": 1.0,
            },
            # llama.cpp's factor multiplies YaRN's own, 0.1 ln 4 + 1.
            RopeConfig(
                kind="yarn", factor=4.0, original_max_position=16, attention_factor=0.5 * (0.1 * np.log(4.0) + 1)
            ),
        ),
    ],
)
def test_scalings_of_gguf(keys, rope):
    assert from_gguf(**keys).rope == rope


def test_llama3_scaling_reaches_a_gguf_as_divisors(tmp_path):
    hf = from_hf(rope_theta=500.0, rope_scaling=dict(tiny._LLAMA3))
    plain = from_hf(rope_theta=500.0)
    seen = jnp.array([5, 60])
    want, _ = frequencies(hf, seen)
    base, _ = frequencies(plain, seen)
    # llama.cpp's converter writes plain / scaled.
    divisors = np.asarray(base[0] / want[0])
    case = gguf_files.case("llama_gqa", rope_theta=500.0)
    tensors = gguf_files.gguf_tensors(case) | {"rope_freqs.weight": divisors}
    path = gguf_files.write(tmp_path / "m.gguf", "llama", gguf_files.metadata(case), tensors)
    ours, factor = frequencies(load(path).config, seen)
    np.testing.assert_allclose(ours, want, rtol=2e-7)
    assert factor == 1.0


def test_only_one_list_of_divisors_is_refused():
    with pytest.raises(WeightsError, match=r"only one of rope_factors"):
        from_gguf(factors={"rope_factors_short": (1.0,) * 4})


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"llama.block_count": None}, "lacks the key llama.block_count"),
        ({"llama.attention.head_count_kv": [2, 1]}, "every layer its own llama.attention.head_count_kv"),
        ({"llama.rope.dimension_count": 4}, "only a part of each head"),
        ({"llama.attention.sliding_window": 16}, "sliding-window"),
        ({"llama.expert_count": 8, "llama.expert_feed_forward_length": 4}, "lacks the key llama.expert_used_count"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "rope_factors_short/long"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.yarn_ext_factor": 0.5,
            },
            "mixes rotary scalings (yarn_ext_factor is 0.5); only 1 is read",
        ),
    ],
)
def test_gguf_keys_that_cannot_be_run(keys, sentence):
    with pytest.raises(WeightsError) as caught:
        from_gguf(**keys)
    assert sentence in str(caught.value)


def test_unknown_architecture_of_a_gguf(tmp_path):
    case = gguf_files.case("llama_gqa")
    path = gguf_files.write(tmp_path / "m.gguf", "bert", gguf_files.metadata(case), gguf_files.gguf_tensors(case))
    with pytest.raises(WeightsError, match=r"architecture 'bert', which is not supported; `kvjax models`"):
        load(path)


def test_missing_and_broken_config(tmp_path):
    folder = gguf_files.write_folder(gguf_files.case("llama_gqa"), tmp_path / "m")
    (folder / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config.json is corrupt"):
        load(folder)
    (folder / "config.json").write_text(json.dumps([1]))
    with pytest.raises(WeightsError, match=r"holds no JSON object"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"config.json cannot be read"):
        load(folder)
