"""Weights that are missing, left over, of another shape or corrupt: each is named."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support import gguf_files
from support.weight_folders import change, shard

from kvjax.checkpoints.load import load
from kvjax.errors import WeightsError


def test_missing_weight_is_named_with_what_is_there_instead(folder):
    name = "model.layers.1.mlp.down_proj.weight"
    change(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(WeightsError, match=r"lacks the weight 'model.layers.1.mlp.down_proj.weight'"):
        load(folder)
    change(folder, lambda tensors: tensors.update({name.replace("down", "dwn"): np.zeros((32, 56), np.float32)}))
    with pytest.raises(WeightsError, match=r"holds 'model.layers.1.mlp.dwn_proj.weight' instead"):
        load(folder)


def test_left_over_weight_is_named(folder):
    change(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)}))
    with pytest.raises(WeightsError, match=r"holds the weight 'model.layers.0.self_attn.q_norm.weight', which a llama"):
        load(folder)


def test_wrong_shape_is_named(folder):
    change(folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(31, np.float32)}))
    with pytest.raises(WeightsError, match=r"'model.norm.weight' with shape \[31\].*\[32\]"):
        load(folder)


def test_weight_in_two_shards_is_named(folder):
    shard(folder, both="model.norm.weight")
    with pytest.raises(WeightsError, match=r"sets the weight 'model.norm.weight' twice"):
        load(folder)


def test_weight_that_the_index_promises_is_named(folder):
    shard(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"lacks the weight 'model.extra.weight'"):
        load(folder)


@pytest.mark.parametrize("file", [5, None, ["model.safetensors"]])
def test_an_index_that_names_no_files(folder, file):
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(WeightsError, match=r"corrupt: it has no weight_map from weights to files"):
        load(folder)


def test_a_corrupt_count_of_layers_takes_no_memory(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2**31}))
    many = {"llama.block_count": 2**31}
    for model in (folder, gguf_files.write_case(gguf_files.case("llama_gqa"), tmp_path / "many.gguf", **many)):
        with pytest.raises(WeightsError, match=r"corrupt: it says that the model has 2,147,483,648 layers"):
            load(model)


@pytest.mark.parametrize("kind", ["gemma3_text", "cohere2", "smollm3", "qwen2_moe", "olmo3"])
def test_a_corrupt_count_of_layers_makes_no_list(tmp_path, kind):
    config = gguf_files.case("llama_gqa").config | {"model_type": kind, "num_hidden_layers": 2**31}
    folder = gguf_files.write_folder(gguf_files.case("llama_gqa"), tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"corrupt: it says that the model has 2,147,483,648 layers"):
        load(folder)


def test_a_configuration_nested_without_end(folder):
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(WeightsError, match=r"is corrupt: it is not JSON"):
        load(folder)


def test_missing_shard_is_named(folder):
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00002.safetensors cannot be read"):
        load(folder)


def test_weight_twice_in_a_gguf_is_named(tmp_path):
    case = gguf_files.case("llama_gqa")
    path = gguf_files.write_case(case, tmp_path / "m.gguf")
    # Rename one norm into the other, in the header: both names have the same length.
    data = path.read_bytes().replace(b"blk.1.attn_norm.weight", b"blk.0.attn_norm.weight", 1)
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"sets the weight 'blk.0.attn_norm.weight' twice"):
        load(path)


def test_integers_are_no_weights(folder):
    change(folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(32, np.int8)}))
    with pytest.raises(WeightsError, match=r"stores 'model.norm.weight' as I8"):
        load(folder)


def test_rotary_buffers_are_left_alone(folder):
    buffer = np.ones(4, np.float32)
    change(folder, lambda t: t.update({f"model.layers.{i}.self_attn.rotary_emb.inv_freq": buffer for i in (0, 1)}))
    load(folder)


def test_tied_head_may_be_repeated_but_not_differ(tmp_path):
    folder = gguf_files.write_folder(gguf_files.case("llama_tied"), tmp_path / "m")
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert load(folder).config.tie_embeddings
    change(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(WeightsError, match=r"ties its output to its embedding and also holds a different 'lm_head"):
        load(folder)


def test_truncated_and_corrupt_safetensors(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for broken in (b"", data[:100], data[:-100], b"\xff" * 64):
        path.write_bytes(broken)
        with pytest.raises(WeightsError, match=r"model.safetensors is truncated or corrupt") as caught:
            load(folder)
        assert "\n" not in str(caught.value)


def test_no_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"holds no weights.*convert them"):
        load(folder)
