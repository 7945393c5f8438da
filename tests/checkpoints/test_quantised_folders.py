"""Hugging Face folders that are quantised, in every format that is read, against the floats that they stand for."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from support import family_cases as cases
from support import quantised_folders as quantised
from support import quick

import kvjax
from kvjax.checkpoints.load import load
from kvjax.errors import WeightsError
from kvjax.model import quantised_matmul
from kvjax.model.group_quantised import GroupQuantised
from kvjax.model.params import logical
from kvjax.model.quantised import NUMBERS, QuantisedArray
from pallas_kernels.quantised_matmul import quantised_matmul as group_matmul

LLAMA = cases.FamilyCase(
    "quantised_llama",
    {
        "model_type": "llama", "vocab_size": cases.VOCAB, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 2,
    },
)  # fmt: skip


#: The same with MLPs that two devices divide.
WIDE = dataclasses.replace(LLAMA, config={**LLAMA.config, "intermediate_size": 256})


def _shapes(case: cases.FamilyCase) -> dict[str, list[int]]:
    if not case.name.startswith("quantised"):
        return cases.shapes(case)
    inner = case.config["intermediate_size"]
    layer = {
        "self_attn.q_proj": [64, 64], "self_attn.k_proj": [32, 64], "self_attn.v_proj": [32, 64],
        "self_attn.o_proj": [64, 64], "mlp.gate_proj": [inner, 64], "mlp.up_proj": [inner, 64],
        "mlp.down_proj": [64, inner], "input_layernorm": [64], "post_attention_layernorm": [64],
    }  # fmt: skip
    found = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    ends = {"model.embed_tokens.weight": [cases.VOCAB, 64], "lm_head.weight": [cases.VOCAB, 64]}
    return {**found, **ends, "model.norm.weight": [64]}


def _write(folder: Path, kind: quantised.Kind, case: cases.FamilyCase = LLAMA) -> tuple[Path, Path]:
    """A quantised folder, and one of the floats that it stands for."""
    tensors = cases.values(case, _shapes(case))
    found, floats = quantised.packed(
        kind, tensors, lambda name: tensors[name].ndim == 2 and ("_proj" in name or ".experts." in name)
    )
    described = dataclasses.replace(case, config={**case.config, "quantization_config": kind.described})
    return (
        cases.write_folder(described, folder / "quantised", found),
        cases.write_folder(case, folder / "floats", floats),
    )


def _load(folder, weights=None, **options):
    return load(folder, dtype="float32", weights=weights, progress=False, **options)


def _params(lm):
    return dict(nnx.to_flat_state(nnx.state(lm.params)))


def _logits(lm, count=20):
    from kvjax.runtime.prefill import logits_of

    tokens = jnp.asarray(LLAMA.tokens(count)[None])
    return np.asarray(logits_of(lm.params, tokens, jnp.array([count])))


@pytest.mark.parametrize("name", quantised.KINDS)
def test_numbers_are_those_that_the_folder_stands_for(name, tmp_path):
    kind = quantised.KINDS[name]
    folder, floats = _write(tmp_path, kind)
    want = _params(_load(floats))
    for key, param in _params(_load(folder)).items():
        np.testing.assert_allclose(param.get_value(), want[key].get_value(), rtol=2e-7, atol=1e-9)
    kept = _load(folder, "file")
    for key, param in _params(kept).items():
        value, whole = param.get_value(), want[key]
        if isinstance(value, jax.Array):
            np.testing.assert_array_equal(value, whole.get_value())
            continue
        if kind.kept is None:
            assert isinstance(value, QuantisedArray)
            off = np.abs(logical(param) - logical(whole)).max()
            assert 0 < off <= np.abs(logical(whole)).max() / 250
            continue
        if isinstance(kind.kept, str):
            assert isinstance(value, QuantisedArray) and value.values.dtype == NUMBERS[kind.kept]
        else:
            assert isinstance(value, GroupQuantised)
            group = 64 if "all inputs" in name and key[-1] != "down" else kind.kept[1]
            group = 64 if "zero points" in name and kind.kept[0] == 8 and key[-1] != "down" else group
            assert value.fp8 == name.startswith("fp8")
            assert (value.bits, value.group, value.minimum is not None) == (kind.kept[0], group, kind.kept[2])
        np.testing.assert_allclose(logical(param), logical(whole), rtol=1e-6, atol=2e-7)
    real = sum(leaf.nbytes for leaf in jax.tree.leaves(kept.params))
    config = kvjax.load_config(folder)
    assert config.kept == kept.config.kept and kept.params.number_format == "float32, file weights"
    assert kvjax.plan(config, prompt_tokens=8, weights="file").weights_bytes == real


# Of activations before transformers 5, and since; of a cache as AutoFP8 first wrote one for keys and values.
@pytest.mark.parametrize("scale", ["input_scale", "activation_scale", "kv_scale"])
def test_scales_of_activations_and_caches_are_ignored(scale, tmp_path):
    kind = quantised.KINDS["fp8, a scale for all"]
    tensors = cases.values(LLAMA, _shapes(LLAMA))
    found, _ = quantised.packed(kind, tensors, lambda name: "_proj" in name)
    stems = {name.partition(".weight_scale")[0] for name in found if ".weight_scale" in name}
    assert stems
    described = dataclasses.replace(LLAMA, config={**LLAMA.config, "quantization_config": kind.described})
    more = found | {f"{stem}.{scale}": np.float32([0.5]) for stem in stems}
    want = _params(_load(cases.write_folder(described, tmp_path / "without", found), "file"))
    for key, param in _params(_load(cases.write_folder(described, tmp_path / "with", more), "file")).items():
        jax.tree.map(np.testing.assert_array_equal, param.get_value(), want[key].get_value())


@pytest.mark.parametrize("name", ["gptq, zero points", "awq", "int8", "int4", "fp8", "fp8 in blocks"])
def test_logits_are_those_of_the_floats_but_for_rounded_activations(name, tmp_path, monkeypatch):
    folder, floats = _write(tmp_path, quantised.KINDS[name])
    theirs = _logits(_load(floats))
    np.testing.assert_allclose(_logits(_load(folder)), theirs, atol=1e-5 * theirs.std())
    lm = _load(folder, "file")
    off = np.sqrt(((_logits(lm) - theirs) ** 2).mean()) / theirs.std()
    assert off < 1e-5 if name.startswith("fp8") else 0 < off < 0.05
    monkeypatch.setattr(quantised_matmul, "group_matmul", functools.partial(group_matmul, implementation="xla"))
    for form in ("_fine", "_coarse"):
        monkeypatch.setattr(quantised_matmul, form, quantised_matmul._weights_alone)
    theirs = _logits(_load(floats), 21)  # another shape, so that products are traced anew
    np.testing.assert_allclose(_logits(lm, 21), theirs, atol=2e-5 * theirs.std())


@pytest.mark.parametrize("name", ["mixtral", "qwen2_window", "olmo2"])
@pytest.mark.parametrize("form", ["gptq, groups of all inputs", "int8"])
def test_families_of_experts_biases_and_fused_matrices(name, form, tmp_path):
    case = next(case for case in cases.CASES if case.name == name)
    folder, floats = _write(tmp_path, quantised.KINDS[form], case)
    want = _params(_load(floats))
    for weights in (None, "file"):
        for key, param in _params(_load(folder, weights)).items():
            close = 1e-6 if form == "int8" or weights is None or key[-1] in ("qkv", "out") else 0.02
            np.testing.assert_allclose(logical(param), logical(want[key]), atol=close)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_other_weights_round_the_floats(weights, tmp_path):
    folder, floats = _write(tmp_path, quantised.KINDS["awq"])
    one, other = (_load(path, weights) for path in (folder, floats))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1), one.params, other.params)


def test_biases_of_zeros_that_the_family_lacks_are_left_out(tmp_path):
    folder, _ = _write(tmp_path, quantised.KINDS["gptq"])
    path = folder / "model.safetensors"
    tensors = load_file(path)
    bias = "model.layers.1.self_attn.k_proj.bias"
    save_file(tensors | {bias: np.zeros(32, np.float16)}, path)
    _load(folder)
    save_file(tensors | {bias: np.ones(32, np.float16)}, path)
    with pytest.raises(WeightsError, match=f"holds the weight '{bias}', which a llama model does not have"):
        _load(folder)


_MESH = """
import sys, jax, numpy as np, kvjax
for folder in sys.argv[1:]:
    load = lambda mesh: kvjax.load(folder, dtype="float32", weights="file", mesh=mesh, progress=False)
    plain, spread = load(None), load("model=2")
    for one, other in zip(jax.tree.leaves(plain.params), jax.tree.leaves(spread.params), strict=True):
        np.testing.assert_array_equal(one, other)
    split = spread.params.layers[0].gate_up.get_value().values
    assert not split.sharding.is_fully_replicated
    asked = {"max_new_tokens": 5, "chat": False, "temperature": 0.0}
    answers = [kvjax.generate(lm, "w3 w7 w9", **asked).tokens for lm in (plain, spread)]
    assert answers[0] == answers[1], answers
"""


@pytest.mark.slow
def test_a_mesh_answers_as_one_device(tmp_path):
    folders = [
        _write(tmp_path / name, quantised.KINDS[name], WIDE)[0] for name in ("awq", "int8", "fp8 in blocks", "int4")
    ]
    done = subprocess.run(
        [sys.executable, "-c", _MESH, *map(str, folders)],
        env=os.environ | quick.on_devices(2),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_converted_folder_is_the_same_model(tmp_path):
    folder, _ = _write(tmp_path, quantised.KINDS["int8"])
    kvjax.convert(folder, tmp_path / "out", weights="file", dtype="float32", progress=False)
    one, other = _load(folder, "file"), _load(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    assert one.config == other.config


@pytest.mark.parametrize(
    ("form", "end"), [("gptq, zero points", ".scales"), ("int8", ".weight_scale"), ("fp8", ".weight_scale")]
)
def test_a_scale_that_is_no_number_is_refused(form, end, tmp_path):
    folder, _ = _write(tmp_path, quantised.KINDS[form])
    tensors = quantised.read(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    tensors[name + end] = tensors[name + end].astype(np.float32)
    tensors[name + end].flat[-1] = np.nan
    save_file(tensors, folder / "model.safetensors")
    for weights in (None, "file", "int4"):
        with pytest.raises(WeightsError, match=rf"corrupt: '{name}.weight' holds what is no finite number"):
            _load(folder, weights)


REFUSED = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised by 'bitsandbytes'"),
    ({"quant_method": "hqq"}, "quantised by 'hqq'"),
    ({"quant_method": "eetq"}, "quantised by 'eetq'"),
    ({"quant_method": ["gptq"]}, "quantised by"),
    ("awq", "quantised"),
    (quantised.gptq_config(bits=3), "by GPTQ to 3 bits"),
    (quantised.gptq_config(bits=2), "by GPTQ to 2 bits"),
    (quantised.gptq_config(bits="4"), "by GPTQ to '4' bits"),
    (quantised.gptq_config(checkpoint_format="marlin"), "by GPTQ in the form 'marlin'"),
    (quantised.gptq_config(format="bitblas"), "by GPTQ in the form 'bitblas'"),
    (quantised.gptq_config(dynamic={"+:.*down.*": {"bits": 8}}), "rules of its own for some layers"),
    (quantised.gptq_config(group_size="many"), "'many' as its group_size"),
    (quantised.AWQ | {"version": "gemv"}, "AWQ in the form 'gemv'"),
    (quantised.AWQ | {"version": None, "format": "gemv_fast"}, "AWQ in the form 'gemv_fast'"),
    (quantised.AWQ | {"bits": 8}, "by AWQ to 8 bits"),
    (quantised.compressed("nvfp4-pack-quantized"), "in the form 'nvfp4-pack-quantized'"),
    (quantised.compressed("pack-quantized", num_bits=3, type="int", strategy="group"), "to 3 bits of 'int' by 'group'"),
    (quantised.compressed("int-quantized") | {"config_groups": {"a": None}}, "in several forms"),
    (quantised.compressed("int-quantized") | {"transform_config": {"config_groups": {"u": {}}}}, "transformed weights"),
    (quantised.FP8_BLOCKS | {"weight_block_size": [128]}, "as the size of its blocks"),
]


@pytest.mark.parametrize(("described", "said"), REFUSED, ids=lambda value: None)
def test_what_cannot_be_read_says_what_to_do(described, said, tmp_path):
    folder = cases.write_folder(LLAMA, tmp_path / "m", {"a": np.ones(2, np.float32)})
    (folder / "config.json").write_text(json.dumps(dict(LLAMA.config) | {"quantization_config": described}))
    with pytest.raises(WeightsError) as caught:
        _load(folder)
    found = str(caught.value)
    assert said in found and ("or a GGUF of the model" in found or "is needed" in found or "are needed" in found)
