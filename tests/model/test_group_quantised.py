"""int4 weights with a scale for each group of inputs: rounding, and a model of them against the model of floats."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kvjax
from kvjax.chips import chip
from kvjax.model.experts import Experts
from kvjax.model.group_quantised import GroupFormat, GroupQuantised, format_of, group_quantised, rounded_groups
from kvjax.model.matmul import matmul, matmul_nt
from kvjax.model.params import logical
from kvjax.model.quantised import QuantisedArray, dequantised, rows_of
from kvjax.runtime.prefill import logits_of
from kvjax.saving.description import model_identity, same_model
from pallas_kernels.quantised_matmul import weight_tiles

RNG = np.random.default_rng(0)
FLOATS = hnp.arrays(np.float32, (3, 64), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False))


@settings(max_examples=100, deadline=None)
@given(FLOATS)
def test_no_number_is_off_by_more_than_half_a_step(rows):
    whole, scale = rounded_groups(rows, 32)
    assert whole.dtype == np.int8 and scale.dtype == jnp.bfloat16 and scale.shape == (3, 2)
    assert np.abs(whole).max() <= 7 and (scale > 0).all()
    steps = np.repeat(scale.astype(np.float64), 32, axis=-1)
    assert (np.abs(whole * steps - rows) <= steps * (0.5 + 1e-3)).all()
    for host, device in zip((whole, scale), rounded_groups(jnp.asarray(rows), 32), strict=True):
        np.testing.assert_array_equal(host, np.asarray(device))


def test_groups_are_the_largest_that_fit():
    sizes = {format.group: inputs for inputs in (4096, 576, 96) if (format := format_of("int4", 8, inputs))}
    assert sizes == {128: 4096, 64: 576, 32: 96}
    for outputs, inputs in ((8, 48), (7, 64)):
        assert format_of("int4", outputs, inputs) is None
    assert format_of("int8", 8, 4096) is None and format_of(None, 8, 4096) is None


def _any(bits: int, minimum: bool) -> GroupQuantised:
    """A matrix [6, 64] in groups of 32 as a file may hold it."""
    whole = RNG.integers(-8, 8, (6, 64)).astype(np.int8)
    scale, least = (jnp.asarray(RNG.standard_normal((2, 6)).astype(np.float16).view(np.int16)) for _ in range(2))
    values = jnp.asarray(weight_tiles.packed(whole, bits, 32))
    return GroupQuantised(values, scale, least if minimum else None, jnp.dtype("float32"))


def _floats(bits: jax.Array) -> np.ndarray:
    return np.asarray(bits).view(np.float16).astype(np.float64)


@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_are_what_the_docstring_says(bits, minimum):
    weight = _any(bits, minimum)
    assert weight.shape == (6, 64) and weight.ndim == 2 and weight.group == 32 and weight.bits == bits
    whole, scale = np.asarray(weight_tiles.unpacked(weight.values), np.float64), _floats(weight.scale)
    want = (whole + (8 if minimum and bits == 4 else 0)) * np.repeat(scale.T, 32, axis=1)
    if minimum:
        want += np.repeat(_floats(weight.minimum).T, 32, axis=1)
    np.testing.assert_allclose(dequantised(weight), want, rtol=1e-6, atol=1e-6)
    index = jnp.array([[5, 0], [2, 3]])
    np.testing.assert_allclose(rows_of(weight, index), want[np.asarray(index)], rtol=1e-6, atol=1e-6)
    x = jnp.asarray(RNG.standard_normal((2, 1, 64)), jnp.float32)
    for form in (matmul, matmul_nt):
        assert np.abs(jax.jit(form)(x, weight) - np.asarray(x) @ want.T).max() < 0.05 * want.std() * 8
    arrays = [x for x in (weight.values, weight.scale, weight.minimum) if x is not None]
    assert weight.nbytes == sum(x.nbytes for x in arrays) and weight.values.nbytes == 6 * 64 * bits // 8


TINY = {
    "tied": {"hidden_size": 64},
    "untied": {"hidden_size": 64, "tie_embeddings": False, "mlp": "gelu", "mlp_bias": True},
    "experts": {"hidden_size": 64, "experts": Experts(8, 2, 32, shared_inner=32)},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", TINY.values(), ids=TINY)
def test_a_model_is_nearly_that_of_floats_and_its_bytes_are_counted(changes):
    plain, int4 = (toys.tiny_model(**changes, weights=weights) for weights in (None, "int4"))
    for name in ("qkv", "out"):
        weight = getattr(int4.params.layers[0], name)
        assert isinstance(weight.get_value(), GroupQuantised)
        one, other = (np.asarray(logical(getattr(lm.params.layers[0], name))) for lm in (plain, int4))
        assert 0 < np.abs(one - other).max() <= np.abs(one).max() / 14 * 1.01
    assert isinstance(int4.params.head.get_value(), QuantisedArray)
    tokens, count = jnp.asarray(RNG.integers(0, 256, (1, 20))), jnp.array([20])
    one, other = (np.asarray(logits_of(lm.params, tokens, count)) for lm in (plain, int4))
    assert np.sqrt(((one - other) ** 2).mean()) < 0.5 * one.std()
    assert int4.params.number_format == "float32, int4 weights"
    real = sum(leaf.nbytes for leaf in jax.tree.leaves(int4.params))
    config = dataclasses.replace(int4.config, weights=None)
    assert kvjax.plan(int4, prompt_tokens=8).weights_bytes == real
    assert kvjax.plan(config, prompt_tokens=8, weights="int4").weights_bytes == real
    assert real < kvjax.plan(config, prompt_tokens=8, weights="int8").weights_bytes


@pytest.mark.slow
def test_a_model_answers_a_prompt_alone_as_in_a_batch():
    lm = toys.tiny_model(**TINY["tied"], weights="int4")
    prompts = ["hello there", "an altogether longer prompt than the first", "x"]
    asked = {"max_new_tokens": 6, "chat": False, "temperature": 0.0}
    together = kvjax.generate(lm, prompts, **asked)
    assert [kvjax.generate(lm, prompt, **asked).tokens for prompt in prompts] == [each.tokens for each in together]


def test_it_is_another_model_to_saved_conversations():
    int8, int4 = (toys.tiny_model(weights=weights) for weights in ("int8", "int4"))
    one, other = model_identity(int8), model_identity(int4)
    assert one["config"] != other["config"] and one["weights"] != other["weights"]
    with pytest.raises(kvjax.UsageError, match=r"loaded with weights='int8', and 'tiny' has weights='int4'"):
        same_model(one, int4)
    same_model(other, int4)


# JAX 0.11 announced the end of Pallas' Triton backend.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(("name", "platform"), [("v5e", "tpu"), ("h100", "cuda")])
def test_few_rows_are_multiplied_by_the_kernel_of_the_chip_and_many_by_xla(name, platform):
    weight = jax.eval_shape(lambda: group_quantised(jnp.zeros((256, 512)), GroupFormat(4, 128), jnp.bfloat16))
    with chip(name).compiled_for():
        for rows, kernels in ((8, 1), (512, 0)):
            x = jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16)
            traced = jax.jit(lambda x, weight: matmul(x, weight)).trace(x, weight)
            program = traced.lower(lowering_platforms=(platform,)).as_text()
            assert program.count("stablehlo.custom_call @") == kernels, program


def test_formats_of_files_have_shapes_without_numbers():
    form = GroupFormat(4, 32, minimum=True, scale="float16")
    made = jax.eval_shape(lambda: group_quantised(jnp.zeros((6, 64)), form, jnp.float32))
    assert made.shape == (6, 64) and made.scale.dtype == made.minimum.dtype == jnp.int16
    assert made.scale.shape == made.minimum.shape == (2, 6) and made.values.shape == (1, 3, 64)
