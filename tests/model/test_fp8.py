"""float8_e4m3fn weights: rounding and products against NumPy in float64, and a model of them against that of floats."""

from __future__ import annotations

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kvjax
from kvjax.errors import UsageError
from kvjax.model.experts import Experts
from kvjax.model.matmul import matmul, matmul_nt, ragged_matmul
from kvjax.model.params import logical
from kvjax.model.quantised import QuantisedArray, dequantised, quantised, rounded_to, rows_of
from kvjax.model.quantised_matmul import _weights_alone
from kvjax.runtime.prefill import logits_of
from kvjax.saving.description import model_identity, same_model
from pallas_kernels.quantised_matmul import weight_tiles

FP8 = jnp.uint8  # the bits
RNG = np.random.default_rng(0)
FLOATS = hnp.arrays(np.float32, (3, 8), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False))


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def _numbers(bits) -> np.ndarray:
    return np.asarray(bits).view(jnp.float8_e4m3fn).astype(np.float64)


def test_bits_stand_for_numbers_on_every_platform():
    every = np.array([i for i in range(256) if i & 0x7F != 0x7F], np.uint8)
    np.testing.assert_array_equal(jax.jit(lambda x: weight_tiles.fp8_floats(x, jnp.float32))(every), _numbers(every))
    np.testing.assert_array_equal(jax.jit(weight_tiles.by_integers)(every), _numbers(every))
    np.testing.assert_array_equal(jax.jit(weight_tiles.by_integers)(every.view(np.int8)), _numbers(every))
    np.testing.assert_array_equal(weight_tiles.fp8_typed(jnp.asarray(every)).astype(jnp.float32), _numbers(every))


def _weight(*shape: int, dtype=jnp.float32) -> QuantisedArray:
    return quantised(_normal(*shape), dtype, numbers=FP8)


@settings(max_examples=100, deadline=None)
@given(FLOATS)
def test_no_number_is_off_by_more_than_half_of_its_last_place(rows):
    values, scale = rounded_to(FP8, rows)
    assert values.dtype == FP8 and scale.dtype == np.float32 and (scale > 0).all()
    whole = _numbers(values)
    assert np.isfinite(whole).all()
    off = np.abs(whole * scale.astype(np.float64) - rows)
    # Three bits of mantissa; below 2^-6, steps of 2^-9.
    assert (off <= np.maximum(np.abs(rows.astype(np.float64)) / 16, scale * 2.0**-10) * (1 + 1e-4)).all()
    largest = np.abs(rows).max(axis=-1)
    assert (np.abs(whole).max(axis=-1)[largest > 2.0**-115] == 448).all()
    assert not whole[largest == 0].any()


def test_the_host_and_the_device_round_alike():
    rows = RNG.standard_normal((40, 333)).astype(np.float32) * 10.0 ** RNG.integers(-20, 20, (40, 1))
    rows = rows.astype(np.float32)
    for host, device in zip(rounded_to(FP8, rows), rounded_to(FP8, jnp.asarray(rows)), strict=True):
        np.testing.assert_array_equal(host, np.asarray(device))


@pytest.mark.parametrize("shape", [(24,), (1, 24), (9, 24), (2, 1, 24), (0, 24)])
def test_products_are_those_with_the_numbers(shape):
    x, weight = _normal(*shape), _weight(1536, 24)
    numbers = _numbers(weight.values) * np.asarray(weight.scale, np.float64)[:, None]
    for form in (matmul, matmul_nt):
        found = jax.jit(form)(x, weight)
        assert found.shape == (*shape[:-1], 1536) and found.dtype == jnp.float32
        np.testing.assert_allclose(found, np.asarray(x, np.float64) @ numbers.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        _weights_alone(x.reshape(-1, 24), weight.values, weight.scale), x.reshape(-1, 24) @ numbers.T, atol=1e-4
    )
    np.testing.assert_allclose(rows_of(weight, jnp.array([7, 0])), numbers[[7, 0]], rtol=1e-6)


def test_a_row_is_what_it_is_alone_whatever_is_beside_it():
    x, weight = _normal(9, 64), _weight(40, 64)
    together = jax.jit(matmul)(x, weight)
    for i in range(9):
        np.testing.assert_allclose(jax.jit(matmul)(x[i : i + 1], weight)[0], together[i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_activations_keep_their_dtype(dtype):
    x, weight = _normal(3, 24).astype(dtype), _weight(40, 24, dtype=dtype)
    assert matmul(x, weight).dtype == dtype and dequantised(weight).dtype == dtype
    assert rows_of(weight, jnp.array([3, 1])).dtype == dtype


def test_no_platform_rounds_activations():
    x, weight = _normal(3, 24), _weight(40, 24)
    for platform in ("cpu", "tpu", "cuda"):
        text = jax.export.export(jax.jit(matmul), platforms=[platform])(x, weight).mlir_module()
        product = next(line for line in text.splitlines() if "dot_general" in line)
        assert "xi8>" not in product.split(":")[-1], product


def test_runs_of_experts_are_gone_through_otherwise():
    with pytest.raises(TypeError, match="weights of int8"):
        ragged_matmul(_normal(9, 24), _weight(3, 40, 24), jnp.array([4, 0, 5]))


TINY = {
    "tied": {},
    "untied": {"tie_embeddings": False, "mlp": "gelu", "mlp_bias": True},
    "experts": {"experts": Experts(8, 2, 24, shared_inner=16)},
}


@pytest.mark.parametrize("changes", TINY.values(), ids=TINY)
def test_a_model_is_nearly_that_of_floats_and_its_bytes_are_counted(changes):
    plain, fp8 = (toys.tiny_model(**changes, weights=weights) for weights in (None, "fp8"))
    for name in ("qkv", "out"):
        one, other = (np.asarray(logical(getattr(lm.params.layers[0], name))) for lm in (plain, fp8))
        assert 0 < np.abs(one - other).max() <= np.abs(one).max() / 16
    tokens, count = jnp.asarray(RNG.integers(0, 256, (1, 20))), jnp.array([20])
    one, other = (np.asarray(logits_of(lm.params, tokens, count)) for lm in (plain, fp8))
    assert 0 < np.sqrt(((one - other) ** 2).mean()) < 0.15 * one.std()
    assert fp8.params.number_format == "float32, fp8 weights"
    real = sum(leaf.nbytes for leaf in jax.tree.leaves(fp8.params))
    config = dataclasses.replace(fp8.config, weights=None)
    assert kvjax.plan(fp8, prompt_tokens=8).weights_bytes == real
    assert kvjax.plan(config, prompt_tokens=8, weights="fp8").weights_bytes == real
    assert real == kvjax.plan(config, prompt_tokens=8, weights="int8").weights_bytes
    matrix = fp8.params.layers[0].qkv.get_value()
    assert matrix.values.dtype == FP8 and matrix.nbytes == matrix.values.size + 4 * matrix.shape[0]


@pytest.mark.slow
def test_a_model_answers_a_prompt_alone_as_in_a_batch():
    lm = toys.tiny_model(weights="fp8")
    prompts = ["hello there", "an altogether longer prompt than the first", "x"]
    asked = {"max_new_tokens": 6, "chat": False, "temperature": 0.0}
    together = kvjax.generate(lm, prompts, **asked)
    assert [kvjax.generate(lm, prompt, **asked).tokens for prompt in prompts] == [each.tokens for each in together]


def test_it_is_another_model_to_saved_conversations():
    int8, fp8 = (toys.tiny_model(weights=weights) for weights in ("int8", "fp8"))
    one, other = model_identity(int8), model_identity(fp8)
    assert one["config"] != other["config"] and one["weights"] != other["weights"]
    with pytest.raises(UsageError, match=r"loaded with weights='int8', and 'tiny' has weights='fp8'"):
        same_model(one, fp8)
    same_model(other, fp8)
