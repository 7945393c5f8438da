"""Sliding windows in configurations, and the language model of a multimodal checkpoint."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from support import family_cases as cases

from kvjax.checkpoints.families import FAMILIES
from kvjax.checkpoints.load import load
from kvjax.errors import WeightsError
from kvjax.model.config import RopeConfig

BASE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 56, "vocab_size": 48, "num_hidden_layers": 6}
GEMMA3 = next(case for case in cases.CASES if case.name == "gemma3")


def config(family: str, **keys):
    own = {"model_type": family, "max_position_embeddings": 8192, "num_key_value_heads": 2}
    return FAMILIES[family].from_hf(BASE | own | keys, "x")


@pytest.mark.parametrize(
    ("family", "keys", "windows"),
    [
        ("mistral", {}, (4096,) * 6),  # version 0.1
        ("mistral", {"sliding_window": None}, ()),  # 0.2 and 0.3
        ("mistral", {"sliding_window": 8192}, ()),  # at least the context: it never slides
        ("ministral", {"sliding_window": 9}, (9,) * 6),
        ("phi3", {"sliding_window": 2047}, (2047,) * 6),
        ("phi3", {}, ()),
        ("starcoder2", {}, ()),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 4}, (None,) * 4 + (4096,) * 2),
        ("qwen2", {"sliding_window": 128}, ()),  # not switched on
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 28}, ()),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 9}, (None, None, None, 9, None, None)),
        ("smollm3", {"sliding_window": 9}, ()),
        ("gemma2", {}, (4096, None) * 3),
        ("gemma3_text", {"sliding_window": 512}, (*(512,) * 5, None)),
        ("gemma3_text", {"sliding_window": 512, "sliding_window_pattern": 2}, (512, None) * 3),
        ("cohere2", {}, (*(4096,) * 3, None, 4096, 4096)),
        ("olmo3", {"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, (None,) * 5 + (4096,)),
    ],
)
def test_windows(family, keys, windows):
    assert config(family, **keys).windows == windows


def test_what_sliding_layers_have_of_their_own():
    gemma = config("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert gemma.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0) and gemma.window_rope == RopeConfig(theta=1e4)
    assert gemma.layer(0).rope == gemma.window_rope and gemma.layer(0).window == 4096
    assert gemma.layer(5).rope == gemma.rope and gemma.layer(5).window is None
    assert config("cohere2").no_rotary_layers == (3,)
    assert config("gemma2").window_rope is None and config("gemma2").attention_soft_cap == 50.0
    assert (config("gemma3_text").attention_soft_cap, config("gemma3_text").attention_scale) == (None, 1 / 16)


def test_quantised_weights_of_a_multimodal_checkpoint_are_refused():
    quantised = {"text_config": BASE, "quantization_config": {"quant_method": "bitsandbytes"}}
    with pytest.raises(WeightsError, match=r"quantised by 'bitsandbytes'"):
        FAMILIES["gemma3"].from_hf({"model_type": "gemma3"} | quantised, "x")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_a_multimodal_checkpoint(prefix, tmp_path):
    tensors = cases.values(GEMMA3, cases.shapes(GEMMA3))
    text = load(cases.write_folder(GEMMA3, tmp_path / "text", tensors), dtype="float32", progress=False)
    folder = cases.write_folder(GEMMA3, tmp_path / "both", tensors)
    keys = {key: value for key, value in GEMMA3.config.items() if key != "vocab_size"}
    raw = {"model_type": "gemma3", "text_config": {**keys, "vocab_size": 48}, "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(raw))
    seeing = {
        "vision_tower.vision_model.post_layernorm.bias": np.zeros(8, np.float32),
        "multi_modal_projector.mm_soft_emb_norm.weight": np.zeros(8, np.float32),
    }
    named = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    save_file(named | seeing, folder / "model.safetensors")
    both = load(folder, dtype="float32", progress=False)
    assert both.config == text.config
    for one, other in zip(jax.tree.leaves(both.params), jax.tree.leaves(text.params), strict=True):
        np.testing.assert_array_equal(one, other)
    save_file(named | {"audio_tower.weight": np.zeros(8, np.float32)}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"audio_tower"):
        load(folder)


@pytest.mark.parametrize("window", [63, 64, 200])
def test_windows_that_never_slide_keep_their_rotary_embedding(window):
    found = FAMILIES["gemma3_text"].from_hf({**GEMMA3.config, "sliding_window": window}, "x")
    assert [found.layer(i).rope.theta for i in range(4)] == [50.0, 50.0, 5000.0, 50.0]
    assert found.windows == (min(window, 64), min(window, 64), None, min(window, 64))
