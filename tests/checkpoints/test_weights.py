"""Every weight lands in its place, from either kind of checkpoint, and nothing is missing, extra or misshapen."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import gguf_files
from support.weight_folders import change, leaves, shard

from kvjax import errors
from kvjax.checkpoints.load import load, weights_dtype
from kvjax.errors import UsageError, WeightsError
from kvjax.model.params import logical

_CASES = ("llama_gqa", "llama_tied", "llama_all_bias_tied", "llama_head_dim", "mistral_gqa", "qwen2_gqa")


@pytest.mark.parametrize("name", _CASES)
def test_places(tmp_path, name):
    case = gguf_files.case(name)
    tensors, lm = gguf_files.weights(case), load(gguf_files.write_folder(case, tmp_path / "m"), dtype="float32")
    heads, group, dim = lm.config.num_kv_heads, lm.config.group_size, lm.config.head_dim
    for index, layer in enumerate(lm.params.layers):
        block = f"model.layers.{index}."
        q, k, v, o, gate, up, down = (
            tensors[f"{block}{part}_proj.weight"]
            for part in (*(f"self_attn.{p}" for p in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
        )
        for head in range(heads):
            for member in range(group):
                at = (head * group + member) * dim
                np.testing.assert_array_equal(logical(layer.qkv)[:, head, member], q[at : at + dim].T)
                np.testing.assert_array_equal(logical(layer.out)[head, member], o[:, at : at + dim].T)
            np.testing.assert_array_equal(logical(layer.qkv)[:, head, group], k[head * dim : (head + 1) * dim].T)
            np.testing.assert_array_equal(logical(layer.qkv)[:, head, group + 1], v[head * dim : (head + 1) * dim].T)
        np.testing.assert_array_equal(logical(layer.gate_up)[:, :, 0].reshape(gate.T.shape), gate.T)
        np.testing.assert_array_equal(logical(layer.gate_up)[:, :, 1].reshape(up.T.shape), up.T)
        np.testing.assert_array_equal(layer.down[...], down.T)
        np.testing.assert_array_equal(layer.input_norm.weight[...], tensors[f"{block}input_layernorm.weight"])
        if lm.config.qkv_bias:
            bias = tensors[f"{block}self_attn.q_proj.bias"].reshape(heads, group, dim)
            np.testing.assert_array_equal(logical(layer.qkv_bias)[:, :group], bias)
    table = lm.params.embed(jnp.arange(lm.config.vocab_size))
    np.testing.assert_array_equal(table, tensors["model.embed_tokens.weight"])
    assert lm.config.tie_embeddings or np.array_equal(logical(lm.params.head), tensors["lm_head.weight"].T)


@pytest.mark.parametrize("name", _CASES)
def test_gguf_equals_safetensors(tmp_path, name):
    case = gguf_files.case(name)
    ours = load(gguf_files.write_case(case, tmp_path / "m.gguf"), dtype="float32")
    theirs = load(gguf_files.write_folder(case, tmp_path / "m"), dtype="float32")
    assert jax.tree.structure(leaves(ours.params)) == jax.tree.structure(leaves(theirs.params))
    for one, other in zip(leaves(ours.params), leaves(theirs.params), strict=True):
        np.testing.assert_array_equal(one, other)
    # GGUF keeps epsilon and theta in float32, and calls a mistral a llama.
    assert ours.config.rms_norm_eps == pytest.approx(theirs.config.rms_norm_eps)
    assert ours.config.rope.theta == pytest.approx(theirs.config.rope.theta)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_round_once(folder, stored, dtype):
    exact = gguf_files.weights(gguf_files.case("llama_gqa"))["model.layers.1.mlp.down_proj.weight"]
    change(folder, lambda tensors: tensors.update({k: v.astype(jnp.dtype(stored)) for k, v in tensors.items()}))
    lm = load(folder, dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(lm.params)} == {jnp.dtype(dtype)}
    want = exact.astype(jnp.dtype(stored)).astype(jnp.dtype(dtype)).T
    np.testing.assert_array_equal(np.asarray(lm.params.layers[1].down[...]), want)


def test_dtype_that_is_not_offered(folder):
    for dtype in ("float64", "int8", "nonsense", 3):
        with pytest.raises(UsageError, match=r"choose float32, bfloat16 or float16"):
            load(folder, dtype=dtype)


def test_weights_that_float16_cannot_hold_are_said(folder):
    change(folder, lambda tensors: tensors["model.norm.weight"].__setitem__(3, 1e5))
    with pytest.raises(WeightsError, match=r"'model.norm.weight' with numbers beyond float16's 65,504"):
        load(folder, dtype="float16")
    assert load(folder, dtype="bfloat16").params.norm.weight[...][3] > 9e4


def gpu(capability: str | None, **more) -> SimpleNamespace:
    return SimpleNamespace(platform="gpu", device_kind="a GPU", compute_capability=capability, **more)


@pytest.mark.parametrize(
    ("capability", "wanted"), [("7.5", "float32"), ("7.0", "float32"), ("8.0", "bfloat16"), ("9.0", "bfloat16"),
                               ("gfx942", "bfloat16"), (None, "bfloat16"), ("10.0", "bfloat16")],
)  # fmt: skip
def test_gpus_before_ampere_get_float32_and_that_is_said_once(monkeypatch, capsys, capability, wanted):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu(capability)])
    errors.say_once.cache_clear()
    assert {jnp.dtype(weights_dtype(None)).name for _ in range(3)} == {wanted}
    said = capsys.readouterr().err
    assert said.count("\n") == (wanted == "float32") and (wanted != "float32" or f"capability {capability}" in said)
    assert weights_dtype("float16") == jnp.float16


def test_shards_equal_one_file(folder, tmp_path):
    whole = load(folder, dtype="float32")
    shard(folder)
    for one, other in zip(leaves(whole.params), leaves(load(folder, dtype="float32").params), strict=True):
        np.testing.assert_array_equal(one, other)
