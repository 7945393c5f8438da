"""gpt-oss's experts as its published weights have them, in 4 bits, against the ``gguf`` package's own numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from support import family_cases as cases
from support import family_gguf, gguf_files

import kvjax
from kvjax.checkpoints.families import FAMILIES
from kvjax.checkpoints.gguf import dequantize
from kvjax.checkpoints.load import load
from kvjax.checkpoints.mxfp4 import dequantized
from kvjax.errors import WeightsError
from kvjax.model.group_quantised import GroupQuantised
from kvjax.model.params import logical
from kvjax.runtime.prefill import logits_of

KIND = gguf.GGMLQuantizationType.MXFP4
EXPERTS = ("gate_up_proj", "down_proj")


def by_turns(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks and scales as safetensors have them, of llama.cpp's [..., 17]: a scale, bytes of numbers i and i + 16."""
    scale, numbers = packed[..., 0], packed[..., 1:]
    codes = np.concatenate([numbers & 15, numbers >> 4], axis=-1)
    return codes[..., ::2] | codes[..., 1::2] << 4, scale


def quantised(tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks and scales of a float tensor [E, M, N], and the floats that they stand for."""
    packed = gguf.quantize(np.ascontiguousarray(tensor.swapaxes(1, 2)), KIND)
    floats = gguf.dequantize(packed, KIND).swapaxes(1, 2)
    return *by_turns(packed.reshape(*packed.shape[:-1], -1, 17)), np.ascontiguousarray(floats)


@pytest.fixture(scope="module")
def case() -> cases.FamilyCase:
    found = next(case for case in cases.CASES if case.name == "gpt_oss")
    quantisation = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    changes = {"intermediate_size": 32, "swiglu_limit": 7.0, "quantization_config": quantisation}
    return dataclasses.replace(found, config={**found.config, **changes})


@pytest.fixture(scope="module")
def tensors(case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """As published, and the same in float."""
    sizes = {24: 32, 48: 64}
    shapes = {
        name: [sizes.get(size, size) for size in shape] if ".experts." in name else shape
        for name, shape in cases.shapes(case).items()
    }
    packed, floats = {}, cases.values(case, shapes)
    for name in [name for name in floats if name.endswith(EXPERTS)]:
        packed[name + "_blocks"], packed[name + "_scales"], floats[name] = quantised(floats[name])
    return {name: tensor for name, tensor in floats.items() if not name.endswith(EXPERTS)} | packed, floats


def write(case: cases.FamilyCase, folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    return cases.write_folder(case, folder, {name: np.ascontiguousarray(x) for name, x in tensors.items()})


def test_every_number_under_every_scale():
    codes, scales = np.arange(16, dtype=np.uint8), np.arange(255, dtype=np.uint8)
    packed = np.empty((255, 17), np.uint8)
    packed[:, 0], packed[:, 1:] = scales, codes | codes[::-1] << 4
    with np.errstate(over="ignore"):
        want = gguf.dequantize(packed, KIND)
        found = dequantized(*(x[:, None] for x in by_turns(packed)))
        np.testing.assert_array_equal(found, want)
        np.testing.assert_array_equal(dequantize(packed.reshape(-1), KIND).reshape(want.shape), want)
    assert np.isnan(dequantized(by_turns(packed)[0][:1, None], np.array([[255]], np.uint8))).all()


def test_what_is_published_loads_as_the_same_in_float(case, tensors, tmp_path):
    published, floats = tensors
    ours = load(write(case, tmp_path / "m", published), dtype="float32", progress=False)
    plain = dataclasses.replace(case, config={k: v for k, v in case.config.items() if k != "quantization_config"})
    theirs = load(write(plain, tmp_path / "f", floats), dtype="float32", progress=False)
    assert ours.config == theirs.config
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


def test_parts_of_a_tensor_in_two_files(case, tensors, tmp_path):
    published, _ = tensors
    folder = write(case, tmp_path / "m", published)
    one = load(folder, dtype="float32", weights="int8", progress=False)
    (folder / "model.safetensors").unlink()
    files = {name: f"{'second' if name.endswith('_scales') else 'first'}.safetensors" for name in published}
    for file in set(files.values()):
        held = {name: np.ascontiguousarray(x) for name, x in published.items() if files[name] == file}
        save_file(held, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    two = load(folder, dtype="float32", weights="int8", progress=False)
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


def test_a_gguf_with_experts_in_4_bits(case, tensors, tmp_path):
    published, floats = tensors
    theirs = load(write(case, tmp_path / "m", published), dtype="float32", progress=False)
    converted = family_gguf.tensors(case, floats)
    keys = family_gguf.metadata(case) | family_gguf.tokenizer_keys(cases.VOCAB)
    kinds = {name: KIND for name in converted if name.endswith("_exps.weight")}
    path = gguf_files.write(tmp_path / "m.gguf", "gpt-oss", keys, converted, kinds)
    ours = load(path, dtype="float32", progress=False)
    assert len(kinds) == 9 and ours.config.experts == theirs.config.experts and ours.config.rope == theirs.config.rope
    for one, other in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_its_4_bits_are_kept(case, tensors, tmp_path):
    """Of a folder and of a GGUF: the same numbers, in 4.5 bits with their scales, and the answers of floats."""
    published, floats = tensors
    folder = write(case, tmp_path / "m", published)
    converted = family_gguf.tensors(case, floats)
    kinds = {name: KIND for name in converted if name.endswith("_exps.weight")}
    keys = family_gguf.metadata(case) | family_gguf.tokenizer_keys(cases.VOCAB)
    path = gguf_files.write(tmp_path / "m.gguf", "gpt-oss", keys, converted, kinds)
    plain = load(folder, dtype="float32", progress=False)
    for place in (folder, path):
        kept = load(place, dtype="float32", weights="file", progress=False)
        for ours, theirs in zip(kept.params.layers, plain.params.layers, strict=True):
            for name in ("gate_up", "down"):
                weight = getattr(ours.experts, name).get_value()
                assert isinstance(weight, GroupQuantised) and weight.fp4
                assert weight.nbytes * 8 == 4.5 * np.prod(weight.shape)
                found, want = (logical(getattr(layer.experts, name)) for layer in (ours, theirs))
                np.testing.assert_array_equal(found, want)
            assert isinstance(ours.qkv.get_value(), jax.Array)
        real = sum(leaf.nbytes for leaf in jax.tree.leaves(kept.params))
        assert kvjax.plan(kvjax.load_config(place), prompt_tokens=8, weights="file").weights_bytes == real
        one, other = (np.asarray(_logits(lm, case)) for lm in (kept, plain))
        # Activations are rounded, by which a token near the border of two experts may go through the other.
        assert 0 < np.median(np.abs(one - other)) < 0.03 * other.std()


def _logits(lm, case):
    tokens = jnp.asarray(case.tokens(20)[None])
    return logits_of(lm.params, tokens, jnp.array([20]))


def test_a_scale_whose_numbers_float32_does_not_hold_is_refused(case, tensors, tmp_path):
    published, _ = tensors
    name = next(name for name in published if name.endswith("_scales"))
    scales = published[name].copy()
    scales.flat[3] = 253
    folder = write(case, tmp_path / "m", {**published, name: scales})
    with pytest.raises(WeightsError, match="holds what is no finite number"):
        load(folder, dtype="float32", weights="file", progress=False)


@pytest.mark.parametrize("described", [{"quant_method": "awq"}, {"bits": 4}, "mxfp4"], ids=str)
def test_other_quantisations_are_refused(case, described):
    with pytest.raises(WeightsError, match="quantization_config"):
        FAMILIES["gpt_oss"].from_hf({**case.config, "quantization_config": described}, "config.json")


def test_what_a_file_does_not_say_is_as_published(case):
    keys = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    found = FAMILIES["gpt_oss"].from_hf({**{key: case.config[key] for key in keys}, "num_attention_heads": 8}, "c")
    assert found.windows == (128, None, 128) and found.num_kv_heads == 8 and found.head_dim == 64
    assert (found.rope.kind, found.rope.theta, found.rope.truncate) == ("yarn", 150000.0, False)
    assert (found.experts.count, found.experts.active, found.experts.limit) == (128, 4, 7.0)
