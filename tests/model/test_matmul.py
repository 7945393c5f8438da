"""Products of a few rows: the forms that CPUs read weights fastest in are the plain product, and only theirs."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from support.native import needs_native

from kvjax.model.matmul import matmul, matmul_nt


def _turned(x: jax.Array, weight: jax.Array) -> jax.Array:
    return matmul_nt(x, weight.T)


FORMS = {"stored [K, N]": matmul, "stored [N, K]": _turned}


def _problem(shape: tuple[int, ...], columns: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal(shape), rng.standard_normal((shape[-1], columns))
    return jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32)


@pytest.mark.parametrize("columns", [1, 40, 42, 16 * 24, 16 * 24 + 1])
@pytest.mark.parametrize("inner", [24, 32, 7, 10])
@pytest.mark.parametrize("rows", [(0,), (1,), (2,), (3,), (8,), (25,), (33,), (2, 1), (1, 1), (2, 0), ()])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_is_the_plain_product(form, rows, inner, columns):
    x, weight = _problem((*rows, inner), columns)
    found = jax.jit(form)(x, weight)
    np.testing.assert_allclose(found, np.asarray(x) @ np.asarray(weight), rtol=1e-5, atol=1e-5)
    assert found.shape == (*rows, columns) and found.dtype == x.dtype


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_bfloat16_stays_bfloat16(form, rows):
    x, weight = (each.astype(jnp.bfloat16) for each in _problem((rows, 24), 40))
    found = jax.jit(form)(x, weight)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, jax.jit(jnp.matmul)(x, weight))


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_bfloat16_weights_give_float32_scores(rows):
    x, weight = (each.astype(jnp.bfloat16) for each in _problem((rows, 24), 40))
    found = jax.jit(matmul_nt, static_argnums=2)(x, weight.T, jnp.float32)
    assert found.dtype == jnp.float32
    exact = np.asarray(x, np.float32) @ np.asarray(weight, np.float32)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_another_dtype_is_given_whatever_the_number_of_rows(rows, dtype):
    x, weight = _problem((rows, 24), 40)
    found = jax.jit(matmul_nt, static_argnums=2)(x, weight.T, dtype)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float32), x @ weight, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("form", "rows", "columns", "split"),
    [
        ("stored [K, N]", 1, 40, True),
        ("stored [K, N]", 1, 16 * 24 + 1, False),
        ("stored [N, K]", 1, 40, True),
        ("stored [N, K]", 1, 16 * 24 + 1, False),
        ("stored [N, K]", 8, 40, True),
        ("stored [N, K]", 8, 16 * 24 + 2, True),
        ("stored [N, K]", 33, 40, False),
    ],
)
def test_few_rows_are_computed_in_parts_on_cpus_alone(form, rows, columns, split, monkeypatch):
    monkeypatch.setenv("KVJAX_NATIVE", "0")
    arguments = _problem((rows, 24), columns)
    for platform in ("cpu", "tpu", "cuda"):
        text = jax.export.export(jax.jit(FORMS[form]), platforms=[platform])(*arguments).mlir_module()
        assert ("batching_dims" in text) == (split and platform == "cpu"), platform


@needs_native
@pytest.mark.parametrize(
    ("shape", "native"),
    [
        ((24,), False),
        ((2, 24), True),
        ((128, 24), True),
        ((129, 24), True),
        ((1, 24), False),
        ((1, 64, 24), True),
        ((2, 64, 24), True),
    ],
)
def test_several_rows_are_multiplied_by_compiled_code_unless_it_is_switched_off(monkeypatch, shape, native):
    x, weight = _problem(shape, 40)
    for form, name in ((matmul, "@kvjax_float_product("), (_turned, "@kvjax_float_product_nt(")):
        assert (name in jax.jit(form).lower(x, weight).as_text()) == native
        narrow = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
        assert "kvjax_float" not in jax.jit(form).lower(*narrow).as_text()
    monkeypatch.setenv("KVJAX_NATIVE", "0")
    assert "kvjax_float" not in jax.jit(lambda *given: matmul(*given)).lower(x, weight).as_text()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shape", [(3, 24), (2, 4, 24)])
def test_its_derivatives_are_the_plain_products(form, shape):
    x, weight = _problem(shape, 40)
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal((*shape[:-1], 40)), jnp.float32)

    def loss(form, x, weight):
        return (form(x, weight) * cotangent).sum()

    for arguments in (0, 1, (0, 1)):
        found = jax.jit(jax.grad(lambda *given: loss(form, *given), arguments))(x, weight)
        wanted = jax.grad(lambda *given: loss(jnp.matmul, *given), arguments)(x, weight)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, wanted)
    twice = jax.hessian(lambda x: form(x, weight).sum() ** 2)(x)
    wanted = jax.hessian(lambda x: (x @ weight).sum() ** 2)(x)
    np.testing.assert_allclose(twice, wanted, rtol=1e-4, atol=1e-3)
