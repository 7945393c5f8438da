"""Quantised GGUF files whose numbers are kept: block by block against the gguf package, and whole models."""

from __future__ import annotations

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import gguf_files

import kvjax
from kvjax.checkpoints.gguf import GGUFFile
from kvjax.checkpoints.gguf_blocks import NUMBERS, format_of
from kvjax.errors import UsageError, WeightsError
from kvjax.model.group_quantised import GroupFormat, GroupQuantised
from kvjax.model.params import logical
from kvjax.model.quantised import QuantisedArray

KINDS = gguf.GGMLQuantizationType
#: Where blocks have their float16 numbers; the others are bytes and bits.
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "Q6_K": [208], "MXFP4": []}


def _blocks(name: str, count: int, size: float = 1.0) -> np.ndarray:
    """Random blocks of a format, their scales and minima of this size."""
    _, width = gguf.GGML_QUANT_SIZES[KINDS[name]]
    random = np.random.default_rng(count)
    raw = random.integers(0, 256, (count, width), np.uint8)
    if name == "MXFP4":
        raw[:, 0] %= 253
    for at in HALVES.get(name, [0, 2]):
        raw[:, at : at + 2] = (size * random.standard_normal((count, 1))).astype(np.float16).view(np.uint8)
    return raw


@pytest.mark.parametrize("name", NUMBERS)
def test_blocks_stand_for_what_the_package_dequantises(name):
    kind = KINDS[name]
    raw = _blocks(name, 64)
    form, (whole, scale, minimum) = format_of(kind), NUMBERS[name](raw.reshape(-1))
    assert isinstance(form, GroupFormat) and whole.dtype == np.int8 and scale.dtype == np.dtype(form.scale)
    assert (minimum is not None) == form.minimum and (form.bits == 8 or np.abs(whole + 0.5).max() <= 7.5)
    whole = np.sign(whole) * np.array([0, 1, 2, 3, 4, 6, 8, 12])[np.abs(whole)] if form.fp4 else whole
    found = whole.reshape(-1, form.group) + np.float64(8 if form.bits == 4 and form.minimum else 0)
    found = found * scale.reshape(-1, 1).astype(np.float64)
    if minimum is not None:
        found = found + minimum.reshape(-1, 1).astype(np.float64)
    np.testing.assert_allclose(found.reshape(-1), gguf.dequantize(raw, kind).reshape(-1), rtol=1e-6, atol=1e-6)


def test_what_other_formats_become():
    assert {format_of(KINDS[name]) for name in ("F32", "F16", "BF16")} == {None}
    assert {format_of(KINDS[name]) for name in ("Q2_K", "Q3_K", "IQ4_XS", "IQ4_NL")} == {"rounded"}


def _write(path, kinds):
    """A llama whose matrices are quantised, each as the first kind whose part of a name is in its own."""
    case = gguf_files.case("llama_gqa", intermediate_size=64)
    tensors = gguf_files.gguf_tensors(case)
    chosen = {
        name: KINDS[kind]
        for name, tensor in tensors.items()
        if tensor.ndim == 2 and (kind := next((kind for part, kind in kinds.items() if part in name), None))
    }
    return gguf_files.write(path, "llama", gguf_files.metadata(case), tensors, chosen)


def _load(path, weights, **options):
    return kvjax.load(path, dtype="float32", weights=weights, progress=False, **options)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_a_model_has_the_numbers_of_its_file(name, tmp_path):
    """Every family's matrices of a file are read as its floats are, so that both are the same numbers."""
    path = _write(tmp_path / "small.gguf", {"token_embd": "Q8_0", "output.weight": "Q8_0", "": name})
    plain, kept = _load(path, None), _load(path, "file")
    ours, theirs = (dict(nnx.to_flat_state(nnx.state(lm.params))) for lm in (kept, plain))
    assert ours.keys() == theirs.keys()
    for key, param in ours.items():
        found = param.get_value()
        assert isinstance(found, GroupQuantised) or found.ndim == 1
        np.testing.assert_allclose(logical(param), logical(theirs[key]), rtol=1e-6, atol=1e-6)
    assert kept.params.number_format == "float32, file weights" and dict(kept.config.kept).keys() >= {"qkv", "head"}
    assert plain.config.kept == ()
    real = sum(leaf.nbytes for leaf in jax.tree.leaves(kept.params))
    assert kvjax.plan(kvjax.load_config(path), prompt_tokens=8, weights="file").weights_bytes == real
    assert kvjax.plan(kept, prompt_tokens=8).weights_bytes == real
    if name.startswith("Q5"):
        return
    # A file's matrices take as many bytes here.
    file = GGUFFile(path)
    stored = sum(
        np.prod(tensor.shape) * np.divide(*gguf.GGML_QUANT_SIZES[tensor.kind][::-1])
        for tensor in file._tensors.values()
    )
    file.close()
    assert real == stored
    prompts = ["hello there", "hell"]
    answers = [kvjax.generate(lm, prompts, max_new_tokens=4, chat=False) for lm in (plain, kept)]
    assert [len(each) for each in answers] == [2, 2]


@pytest.mark.parametrize(("name", "bits"), [("Q4_K", 6), ("Q5_K", 10), ("Q6_K", 10)])
def test_a_model_has_the_numbers_of_its_file_in_blocks_of_256(name, bits, tmp_path):
    case = gguf_files.case("llama_gqa", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    tensors = gguf_files.gguf_tensors(case)
    chosen = {each: KINDS[name] for each, tensor in tensors.items() if each.startswith("blk") and tensor.ndim == 2}
    for index, each in enumerate(chosen):
        rows = len(tensors[each])
        tensors[each] = _blocks(name, rows + 1000 * index, 1e-4)[:rows]
    path = gguf_files.write(tmp_path / "small.gguf", "llama", gguf_files.metadata(case), tensors, chosen)
    plain, kept = _load(path, None), _load(path, "file")
    ours, theirs = (dict(nnx.to_flat_state(nnx.state(lm.params))) for lm in (kept, plain))
    for key, param in ours.items():
        found = param.get_value()
        if isinstance(found, jax.Array):
            continue
        assert isinstance(found, GroupQuantised) and found.nbytes * 8 == bits * np.prod(found.shape)
        np.testing.assert_allclose(logical(param), logical(theirs[key]), rtol=1e-6, atol=1e-7)
    real = sum(leaf.nbytes for leaf in jax.tree.leaves(kept.params))
    assert kvjax.plan(kvjax.load_config(path), prompt_tokens=8, weights="file").weights_bytes == real
    kvjax.generate(kept, "hello", max_new_tokens=2, chat=False)


def test_matrices_of_several_formats_have_one_that_holds_them_all_and_floats_stay(tmp_path):
    kinds = {"blk.0.attn_k": "F16", "attn_v": "Q8_0", "attn": "Q4_0", "blk.0.ffn_down": "MXFP4", "ffn": "Q4_1"}
    path = _write(tmp_path / "mixed.gguf", kinds)
    plain, kept = _load(path, None), _load(path, "file")
    first, second = kept.params.layers
    assert isinstance(first.qkv.get_value(), QuantisedArray), "a part of it is floats"
    qkv = second.qkv.get_value()
    assert isinstance(qkv, GroupQuantised) and (qkv.bits, qkv.group, qkv.minimum) == (8, 32, None)
    assert first.down.get_value().fp4 and not second.down.get_value().fp4
    assert first.out.get_value().minimum is None and second.down.get_value().minimum is not None
    for name in ("qkv", "out", "gate_up", "down"):
        ours, theirs = (logical(getattr(lm.params.layers[1], name)) for lm in (kept, plain))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(logical(first.down), logical(plain.params.layers[0].down))
    assert isinstance(kept.params.head.get_value(), jax.Array)
    int8 = _load(path, "int8")
    np.testing.assert_array_equal(first.qkv.get_value().values, int8.params.layers[0].qkv.get_value().values)
    real = sum(leaf.nbytes for leaf in jax.tree.leaves(kept.params))
    assert kvjax.plan(kvjax.load_config(path), prompt_tokens=8, weights="file").weights_bytes == real
    kvjax.generate(kept, "hello", max_new_tokens=2, chat=False)


def test_files_of_floats_have_none_to_keep(tmp_path):
    path = _write(tmp_path / "floats.gguf", {})
    said = r'this one holds floats, or its weights are not on this machine \(`kvjax fetch` brings them\); choose "int8"'
    for call in (
        lambda: _load(path, "file"),
        lambda: kvjax.plan(kvjax.load_config(path), prompt_tokens=8, weights="file"),
        lambda: _load(gguf_files.write_folder(gguf_files.case("llama_gqa"), tmp_path / "m"), "file"),
    ):
        with pytest.raises(UsageError, match=said):
            call()


def test_a_scale_that_is_no_number_is_refused(tmp_path):
    path = _write(tmp_path / "broken.gguf", {"": "Q4_1"})
    file = GGUFFile(path)
    place = file._start + file._tensors["blk.1.ffn_up.weight"].offset
    file.close()
    data = bytearray(path.read_bytes())
    data[place + 2 : place + 4] = np.float16("nan").tobytes()
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"corrupt: 'blk.1.ffn_up.weight' holds what is no finite number"):
        _load(path, "file")


def test_it_is_another_model_to_saved_conversations(tmp_path):
    from kvjax.saving.description import model_identity, same_model

    path = _write(tmp_path / "small.gguf", {"": "Q4_0"})
    plain, kept = _load(path, None), _load(path, "file")
    with pytest.raises(UsageError, match="loaded with weights='file'"):
        same_model(model_identity(kept), plain)
    same_model(model_identity(kept), kept)
    assert model_identity(kept)["weights"] != model_identity(plain)["weights"]


def test_products_are_those_of_the_files_numbers(tmp_path):
    """Logits differ from those of the same numbers as floats by what rounded activations add alone."""
    from kvjax.runtime.prefill import logits_of

    path = _write(tmp_path / "small.gguf", {"": "Q4_1"})
    tokens, count = jnp.asarray(np.random.default_rng(0).integers(0, 200, (1, 20))), jnp.array([20])
    one, other = (np.asarray(logits_of(_load(path, weights).params, tokens, count)) for weights in (None, "file"))
    assert 0 < np.sqrt(((one - other) ** 2).mean()) < 0.03 * one.std()
