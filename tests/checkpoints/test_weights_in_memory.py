"""What weights take on a device: their parts on a mesh, quantised numbers, and no second copy while they are read."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from flax import nnx
from support import gguf_files, quick
from support.weight_folders import change, python

from kvjax.checkpoints.load import load
from kvjax.errors import WeightsError
from kvjax.model.quantised import QuantisedArray, rounded

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


@pytest.mark.slow
def test_a_mesh_splits_heads_and_channels(folder):
    python(_MESH, str(folder), **quick.on_devices(2))


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
    python(_QUANTISED_MESH, str(folder), **quick.on_devices(2))


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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the peak of a process is read with the resource module")
@pytest.mark.parametrize("source", ["safetensors", "gguf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_takes_no_second_copy(tmp_path, source, dtype):
    # 100 MB in bfloat16: what Python and JAX themselves add while loading stays small beside it.
    changes = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=3, num_attention_heads=16)
    case = gguf_files.case("llama_tied", **changes, num_key_value_heads=8)
    write = gguf_files.write_folder if source == "safetensors" else gguf_files.write_case
    path = write(case, tmp_path / "large.gguf")
    assert float(python(_MEMORY, str(path), dtype)) <= 1.3


@pytest.mark.skipif(sys.platform == "win32", reason="the peak of a process is read with the resource module")
def test_quantised_weights_take_no_float_copy(tmp_path):
    # 50 MB as int8, and 38 a single one of the largest matrices as floats.
    changes = dict(hidden_size=1536, intermediate_size=3072, num_hidden_layers=3, num_attention_heads=24)
    case = gguf_files.case("llama_tied", **changes, num_key_value_heads=8)
    path = gguf_files.write_folder(case, tmp_path / "large")
    assert float(python(_MEMORY, str(path), "float32", "int8")) <= 1.5


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(sys.platform == "win32", reason="the peak of a process is read with the resource module")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_model_takes_no_second_copy(default_model, dtype):
    assert float(python(_MEMORY, default_model.name, dtype)) <= 1.3
