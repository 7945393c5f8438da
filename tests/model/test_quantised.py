"""int8 weights: rounding and products against NumPy in float64, and a model of them against the model of floats."""

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
from kvjax.checkpoints.digest import weights_digest
from kvjax.errors import UsageError
from kvjax.model.decoder import abstract_decoder
from kvjax.model.experts import Experts
from kvjax.model.group_quantised import GroupFormat, group_quantised
from kvjax.model.matmul import matmul, matmul_nt, ragged_matmul
from kvjax.model.params import logical
from kvjax.model.quantised import QuantisedArray, dequantised, quantised, rounded, rows_of
from kvjax.runtime.prefill import logits_of
from kvjax.saving.description import model_identity, same_model

RNG = np.random.default_rng(0)
FLOATS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
)


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


@settings(max_examples=200, deadline=None)
@given(FLOATS)
def test_no_number_is_off_by_more_than_half_a_step(rows):
    values, scale = rounded(rows)
    assert values.dtype == np.int8 and scale.dtype == np.float32 and (scale > 0).all()
    off = np.abs(values * scale.astype(np.float64) - rows)
    assert (off <= scale * (0.5 + 1e-4)).all()
    largest = np.abs(rows).max(axis=-1)
    # The largest number of a row has the largest integer, so that no step is wasted.
    assert (np.abs(values).max(axis=-1) == np.where(largest > 2.0**-118, 127, np.abs(values).max(axis=-1))).all()
    assert not values[largest == 0].any() and (scale[largest == 0] == 1).all()


def test_the_host_and_the_device_round_alike():
    rows = RNG.standard_normal((40, 33)).astype(np.float32) * 10.0 ** RNG.integers(-20, 20, (40, 1))
    rows = rows.astype(np.float32)
    for host, device in zip(rounded(rows), rounded(jnp.asarray(rows)), strict=True):
        np.testing.assert_array_equal(host, np.asarray(device))


def test_several_axes_share_a_scale():
    values, scale = rounded(RNG.standard_normal((3, 4, 5)).astype(np.float32), (0, 2))
    assert scale.shape == (1, 4, 1) and values.shape == (3, 4, 5)


def _oracle(x: np.ndarray, weight: QuantisedArray) -> np.ndarray:
    """The product of rounded activations with rounded weights, in float64."""
    wide = np.asarray(x, np.float64)
    step = np.abs(wide).max(axis=-1, keepdims=True, initial=0) / 127
    whole = np.rint(wide / np.where(step == 0, 1, step)) * step
    return whole @ (np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64)[:, None]).T


@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 24), (9, 24), (2, 1, 24), (0, 24)])
def test_products_are_those_of_rounded_activations(shape):
    x, weight = _normal(*shape), quantised(_normal(40, 24), jnp.float32)
    for form in (matmul, matmul_nt):
        found = jax.jit(form)(x, weight)
        assert found.shape == (*shape[:-1], 40) and found.dtype == jnp.float32
        np.testing.assert_allclose(found, _oracle(np.asarray(x), weight), rtol=2e-4, atol=2e-2)


def test_activations_in_two_parts_are_nearly_exact():
    x, matrix = 10 * _normal(9, 24), _normal(40, 24)
    weight = quantised(matrix, jnp.float32)
    exact = np.asarray(x, np.float64) @ np.asarray(dequantised(weight), np.float64).T
    off = [np.abs(matmul(x, quantised(matrix, jnp.float32, fine)) - exact).max() for fine in (True, False)]
    assert off[0] < 5e-3 and off[1] > 20 * off[0]


@pytest.mark.parametrize("fine", [True, False])
def test_a_row_is_what_it_is_alone_whatever_is_beside_it(fine):
    x, weight = _normal(9, 24), quantised(_normal(40, 24), jnp.float32, fine)
    together = jax.jit(matmul)(x, weight)
    for i in range(9):
        np.testing.assert_array_equal(jax.jit(matmul)(x[i : i + 1], weight)[0], together[i])


@pytest.mark.parametrize("fine", [True, False])
def test_zeros_give_zeros_and_what_is_not_finite_stays_so(fine):
    weight = quantised(_normal(6, 8).at[2].set(0), jnp.float32, fine)
    x = jnp.zeros((4, 8)).at[1, 3].set(jnp.nan).at[2, 3].set(jnp.inf).at[3].set(1)
    found = np.asarray(jax.jit(matmul)(x, weight))
    assert not found[0].any() and not np.isfinite(found[1:3]).any() and np.isfinite(found[3]).all() and found[3, 2] == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_activations_keep_their_dtype(dtype):
    x, weight = _normal(3, 24).astype(dtype), quantised(_normal(40, 24), dtype)
    assert matmul(x, weight).dtype == dtype and dequantised(weight).dtype == dtype
    assert matmul_nt(x, weight, jnp.float32).dtype == jnp.float32
    assert rows_of(weight, jnp.array([3, 1])).dtype == dtype


def test_gpus_multiply_by_weights_alone_and_others_integers(monkeypatch):
    monkeypatch.setenv("KVJAX_NATIVE", "0")  # what a machine calls of its own cannot be exported
    x, weight = _normal(3, 24), quantised(_normal(40, 24), jnp.float32)
    for platform, integers in (("cpu", True), ("tpu", True), ("cuda", False)):
        text = jax.export.export(jax.jit(matmul), platforms=[platform])(x, weight).mlir_module()
        product = next(line for line in text.splitlines() if "dot_general" in line)
        assert ("xi8>" in product.split(":")[-1]) == integers, product


def test_weights_alone_are_the_product_with_their_floats():
    from kvjax.model.quantised_matmul import _weights_alone

    x, weight = _normal(3, 24), quantised(_normal(40, 24), jnp.float32)
    np.testing.assert_allclose(
        _weights_alone(x, weight.values, weight.scale), x @ dequantised(weight).T, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", ["coarse", "fine", "fp8", "int4", "minima"])
def test_derivatives_are_those_of_unrounded_activations(kind, monkeypatch):
    matrix, x = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((40, 64), (3, 64)))
    groups = {"int4": GroupFormat(4, 32), "minima": GroupFormat(8, 16, minimum=True, scale="float32")}
    if kind in groups:
        weight = group_quantised(matrix, groups[kind], jnp.float32)
    else:
        weight = quantised(matrix, jnp.float32, kind == "fine", jnp.uint8 if kind == "fp8" else jnp.int8)
    for native in ("1", "0"):
        monkeypatch.setenv("KVJAX_NATIVE", native)
        jax.clear_caches()
        gradient = jax.jit(jax.grad(lambda x, w: (matmul(x, w) ** 2).sum()))(x, weight)
        np.testing.assert_allclose(gradient, 2 * matmul(x, weight) @ weight.dequantised(), rtol=1e-5, atol=1e-4)
        fixed = jax.grad(lambda y: (matmul(x, weight) * y).sum())(jnp.ones((3, 40)))
        np.testing.assert_array_equal(fixed, matmul(x, weight))
    with pytest.raises(TypeError, match="load the model with floats to train them"):
        jax.grad(lambda weight: matmul(x, weight).sum(), allow_int=True)(weight)


def test_runs_of_experts_are_products_with_each():
    x, weights = _normal(9, 24), quantised(_normal(3, 40, 24), jnp.float32)
    found = jax.jit(ragged_matmul)(x, weights, jnp.array([4, 0, 5]))
    for rows, expert in ((slice(0, 4), 0), (slice(4, 9), 2)):
        own = jax.tree.map(lambda each, expert=expert: each[expert], weights)
        np.testing.assert_allclose(found[rows], matmul(x[rows], own), rtol=1e-6)


TINY = {
    "tied": {},
    "untied": {"tie_embeddings": False, "mlp": "gelu", "mlp_bias": True},
    "experts": {"experts": Experts(8, 2, 24, shared_inner=16)},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", TINY.values(), ids=TINY)
def test_a_model_is_nearly_that_of_floats(changes):
    """The same seed, in floats and rounded: each weight within half a step, and logits within a few percent."""
    plain, int8 = (toys.tiny_model(**changes, weights=weights) for weights in (None, "int8"))
    for name in ("qkv", "out"):
        one, other = (np.asarray(logical(getattr(lm.params.layers[0], name))) for lm in (plain, int8))
        assert 0 < np.abs(one - other).max() <= np.abs(one).max() / 254 * (1 + 1e-5)
    tokens, count = jnp.asarray(RNG.integers(0, 256, (1, 20))), jnp.array([20])
    one, other = (np.asarray(logits_of(lm.params, tokens, count)) for lm in (plain, int8))
    assert np.sqrt(((one - other) ** 2).mean()) < 0.08 * one.std()
    assert int8.params.dtype == jnp.float32 and int8.params.number_format == "float32, int8 weights"


def test_a_model_answers_a_prompt_alone_as_in_a_batch():
    lm = toys.tiny_model(weights="int8")
    prompts = ["hello there", "an altogether longer prompt than the first", "x"]
    asked = {"max_new_tokens": 6, "chat": False, "temperature": 0.0}
    together = kvjax.generate(lm, prompts, **asked)
    assert [kvjax.generate(lm, prompt, **asked).tokens for prompt in prompts] == [each.tokens for each in together]


@pytest.mark.parametrize("changes", TINY.values(), ids=TINY)
def test_plans_count_the_bytes_that_are_there(changes):
    lm = toys.tiny_model(**changes, weights="int8")
    real = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    assert kvjax.plan(lm, prompt_tokens=8).weights_bytes == real
    config = dataclasses.replace(lm.config, weights=None)
    assert kvjax.plan(config, prompt_tokens=8, weights="int8").weights_bytes == real
    assert kvjax.plan(config, prompt_tokens=8).weights_bytes > 2 * real
    # Of each matrix a byte a number, and four an output.
    for param in (lm.params.head, lm.params.layers[0].qkv):
        matrix = param.get_value()
        assert matrix.nbytes == matrix.values.size + 4 * matrix.shape[0]


def test_what_stays_a_float():
    params = abstract_decoder(toys.tiny_config(**TINY["experts"], qkv_bias=True, weights="int8"), jnp.bfloat16)
    layer = params.layers[0]
    floats = (
        layer.input_norm.weight,
        layer.qkv_bias,
        layer.experts.router,
        layer.experts.shared_gate,
        params.norm.weight,
    )
    assert {param.get_value().dtype for param in floats} == {jnp.dtype(jnp.bfloat16)}
    assert not any(isinstance(param.get_value(), QuantisedArray) for param in floats)
    assert layer.experts.gate_up.get_value().values.dtype == jnp.int8


def test_it_is_another_model_to_saved_conversations():
    plain, int8 = (toys.tiny_model(weights=weights) for weights in (None, "int8"))
    one, other = model_identity(plain), model_identity(int8)
    assert one["config"] != other["config"] and one["weights"] != other["weights"]
    said = r"loaded with weights=None, and 'tiny' has weights='int8'; load it as then"
    with pytest.raises(UsageError, match=said):
        same_model(one, int8)
    with pytest.raises(UsageError, match=r"loaded with weights='int8', and 'tiny' has weights=None"):
        same_model(other, plain)
    same_model(other, int8)
    # Of the weights alone too: a job knows them by nothing else.
    assert weights_digest(toys.tiny_model(seed=4, weights="int8").params) != other["weights"]


def test_a_kind_that_there_is_not_is_refused(tiny_model):
    said = r"^weights is 'int9'; choose 'int8', 'int4', 'fp8' or 'file', or None for floats of the model's dtype\.$"
    for call in (
        lambda: kvjax.load("nowhere", weights="int9"),
        lambda: kvjax.plan(tiny_model, prompt_tokens=8, weights="int9"),
        lambda: toys.tiny_config(weights="int9"),
    ):
        with pytest.raises(UsageError, match=said):
            call()
