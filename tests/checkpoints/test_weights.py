"""Every weight lands in its place, from either kind of checkpoint, and nothing is missing, extra or misshapen."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from support import gguf_files, quick

from kvjax.checkpoints import fill
from kvjax.checkpoints.load import load, weights_dtype
from kvjax.errors import UsageError, WeightsError
from kvjax.model.params import logical
from kvjax.model.quantised import QuantisedArray, rounded

_CASES = ("llama_gqa", "llama_tied", "llama_all_bias_tied", "llama_head_dim", "mistral_gqa", "qwen2_gqa")


def leaves(params) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(params)]


@pytest.fixture
def folder(tmp_path):
    """An untied llama in Hugging Face's form."""
    return gguf_files.write_folder(gguf_files.case("llama_gqa"), tmp_path / "model")


def change(folder, edit) -> None:
    """Edit the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


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
    fill.say_once.cache_clear()
    assert {jnp.dtype(weights_dtype(None)).name for _ in range(3)} == {wanted}
    said = capsys.readouterr().err
    assert said.count("\n") == (wanted == "float32") and (wanted != "float32" or f"capability {capability}" in said)
    assert weights_dtype("float16") == jnp.float16


def test_shards_equal_one_file(folder, tmp_path):
    whole = load(folder, dtype="float32")
    _shard(folder)
    for one, other in zip(leaves(whole.params), leaves(load(folder, dtype="float32").params), strict=True):
        np.testing.assert_array_equal(one, other)


def _shard(folder, *, both: str | None = None) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[part::2]) for part in (0, 1)]
    files = [f"model-0000{part + 1}-of-00002.safetensors" for part in (0, 1)]
    table = {name: files[part] for part in (0, 1) for name in halves[part]}
    if both is not None:
        for half in halves:
            half[both] = tensors[both]
    for half, file in zip(halves, files, strict=True):
        save_file(half, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


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
    _shard(folder, both="model.norm.weight")
    with pytest.raises(WeightsError, match=r"sets the weight 'model.norm.weight' twice"):
        load(folder)


def test_weight_that_the_index_promises_is_named(folder):
    _shard(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"lacks the weight 'model.extra.weight'"):
        load(folder)


@pytest.mark.parametrize("file", [5, None, ["model.safetensors"]])
def test_an_index_that_names_no_files(folder, file):
    _shard(folder)
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
    _shard(folder)
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


_MESH = """
import sys, jax, numpy as np
import kvjax
from kvjax.model.params import logical
from kvjax.model.quantised import QuantisedArray, rounded
from kvjax.checkpoints import fill
from kvjax.checkpoints.load import load, weights_dtype
plain = load(sys.argv[1], dtype="float32").params
for mesh in (kvjax.Mesh(model=2), "model=2", jax.make_mesh((2,), ("model",))):
    lm = load(sys.argv[1], dtype="float32", mesh=mesh)
    spread, layer = lm.params, lm.params.layers[0]
    assert (lm.mesh.data, lm.mesh.model) == (1, 2)
    shapes = [x[...].addressable_shards[0].data.shape for x in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    whole = [x[...].shape for x in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    assert shapes == [(m, n // 2) if i == 0 else (m // 2, n) for i, (m, n) in enumerate(whole)], shapes
    assert shapes[0] == (32, 1 * 4 * 8)
    # A device's share of the columns holds as much of the gate as of what it gates.
    share = layer.gate_up[...].addressable_shards[0].data
    gate_up = logical(plain.layers[0].gate_up)
    half = gate_up.shape
    np.testing.assert_array_equal(share.T.reshape(half[0], -1, *half[2:]), gate_up[:, : half[1] // 2])
    # 261 tokens do not halve: the embedding is on both devices whole.
    assert spread.head[...].sharding.is_fully_replicated
    assert layer.input_norm.weight[...].sharding.is_fully_replicated
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(spread), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
assert load(sys.argv[1], mesh="data=2").params.layers[0].qkv[...].sharding.is_fully_replicated

# A host that has only the second device reads and fills no more than that device's share.
from kvjax.checkpoints import fill
read, sharding = [], fill._needed
fill._needed = lambda where, shape: None if sharding(where, shape) is None else sharding(where, shape)[1:]
from kvjax.checkpoints.safetensors import SafetensorsFolder
reads = SafetensorsFolder.read
def counting(self, name, start, stop):
    read.append(name)
    return reads(self, name, start, stop)
SafetensorsFolder.read = counting
fill._BLOCK = 1
half = load(sys.argv[1], dtype="float32", mesh="model=2").params.layers[0]
np.testing.assert_array_equal(half.qkv[...].addressable_shards[1].data, plain.layers[0].qkv[...][:, 32:])
gate_up = plain.layers[0].gate_up[...]
np.testing.assert_array_equal(half.gate_up[...].addressable_shards[1].data, gate_up[len(gate_up) // 2 :])
assert read.count("model.layers.0.self_attn.k_proj.weight") == 1 and "model.layers.0.mlp.up_proj.weight" in read
"""


def test_a_mesh_splits_heads_and_channels(folder):
    _python(_MESH, str(folder), **quick.on_devices(2))


_QUANTISED_MESH = """
import sys, jax, numpy as np
import kvjax
plain, spread = (kvjax.load(sys.argv[1], dtype="float32", weights="int8", mesh=mesh) for mesh in (None, "model=2"))
for one, other in zip(jax.tree.leaves(plain.params), jax.tree.leaves(spread.params), strict=True):
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
layer = spread.params.layers[0]
for name, values, scale in (("qkv", 0, True), ("gate_up", 0, True), ("out", 1, False), ("down", 1, False)):
    weight = getattr(layer, name)[...]
    halves = [n // 2 if axis == values else n for axis, n in enumerate(weight.shape)]
    assert list(weight.values.addressable_shards[0].data.shape) == halves, name
    assert weight.scale.sharding.is_fully_replicated != scale, name
moved = plain.on("model=2")
for one, other in zip(jax.tree.leaves(moved.params), jax.tree.leaves(spread.params), strict=True):
    assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
whole, half = (kvjax.plan(lm, prompt_tokens=8).weights_bytes for lm in (plain, spread))
held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(spread.params))
assert half == held and whole == sum(x.nbytes for x in jax.tree.leaves(plain.params))
"""


def test_a_mesh_holds_the_quantised_numbers_that_one_device_does(folder):
    _python(_QUANTISED_MESH, str(folder), **quick.on_devices(2))


@pytest.mark.parametrize("name", ["llama_gqa", "llama_all_bias_tied", "qwen2_gqa"])
@pytest.mark.parametrize("source", ["safetensors", "gguf"])
def test_quantised_weights_are_the_rounded_floats(tmp_path, name, source):
    """Numbers rounded as they are read, in blocks of a row, are those of the whole matrix."""
    case = gguf_files.case(name)
    path = (gguf_files.write_folder if source == "safetensors" else gguf_files.write_case)(case, tmp_path / "m.gguf")
    plain = load(path, dtype="float32").params
    int8 = load(path, dtype="float32", weights="int8")
    assert int8.config.weights == "int8"
    of_floats = nnx.to_flat_state(nnx.state(plain))
    for (path_, one), (_, other) in zip(of_floats, nnx.to_flat_state(nnx.state(int8.params)), strict=True):
        floats, found = one.get_value(), other.get_value()
        if not isinstance(found, QuantisedArray):
            assert floats.ndim == 1, path_
            np.testing.assert_array_equal(floats, found)
            continue
        rows = np.asarray(floats)
        if other.get_metadata("transposed") != one.get_metadata("transposed"):
            rows = np.ascontiguousarray(rows.T)
        values, scale = rounded(rows)
        np.testing.assert_array_equal(found.values, values)
        np.testing.assert_array_equal(found.scale, scale[:, 0])


def test_numbers_that_are_not_finite_are_not_rounded(folder):
    def edit(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = np.nan

    change(folder, edit)
    with pytest.raises(WeightsError, match=r"'model.layers.1.mlp.up_proj.weight' holds what is no finite number"):
        load(folder, weights="int8")


_MEMORY = """
import resource, sys, jax
import flax.nnx, gguf, tokenizers, transformers
from kvjax.checkpoints import fill
from kvjax.checkpoints.load import load, weights_dtype
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
jax.block_until_ready(jax.numpy.zeros(1))
before = peak()
params = load(sys.argv[1], dtype=sys.argv[2], weights=dict(enumerate(sys.argv)).get(3), progress=False).params
jax.block_until_ready(params)
print((peak() - before) / sum(x.nbytes for x in jax.tree.leaves(params)))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the peak of a process is read with the resource module")
@pytest.mark.parametrize("source", ["safetensors", "gguf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_takes_no_second_copy(tmp_path, source, dtype):
    # 100 MB in bfloat16: what Python and JAX themselves add while loading stays small beside it.
    changes = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=3, num_attention_heads=16)
    case = gguf_files.case("llama_tied", **changes, num_key_value_heads=8)
    write = gguf_files.write_folder if source == "safetensors" else gguf_files.write_case
    path = write(case, tmp_path / "large.gguf")
    assert float(_python(_MEMORY, str(path), dtype)) <= 1.3


@pytest.mark.skipif(sys.platform == "win32", reason="the peak of a process is read with the resource module")
def test_quantised_weights_take_no_float_copy(tmp_path):
    # 50 MB as int8, and 38 a single one of the largest matrices as floats.
    changes = dict(hidden_size=1536, intermediate_size=3072, num_hidden_layers=3, num_attention_heads=24)
    case = gguf_files.case("llama_tied", **changes, num_key_value_heads=8)
    path = gguf_files.write_folder(case, tmp_path / "large")
    assert float(_python(_MEMORY, str(path), "float32", "int8")) <= 1.5


@pytest.mark.model
@pytest.mark.skipif(sys.platform == "win32", reason="the peak of a process is read with the resource module")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_model_takes_no_second_copy(default_model, dtype):
    assert float(_python(_MEMORY, default_model.name, dtype)) <= 1.3


def _python(code: str, *arguments: str, **environment: str) -> str:
    import os

    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
