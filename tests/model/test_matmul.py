"""Products of a few rows: the forms that CPUs read weights fastest in are the plain product, and only theirs."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

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
def test_few_rows_are_computed_in_parts_on_cpus_alone(form, rows, columns, split):
    arguments = _problem((rows, 24), columns)
    for platform in ("cpu", "tpu", "cuda"):
        text = jax.export.export(jax.jit(FORMS[form]), platforms=[platform])(*arguments).mlir_module()
        assert ("batching_dims" in text) == (split and platform == "cpu"), platform
