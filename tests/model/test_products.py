"""Products of a few rows: the forms that CPUs read weights fastest in are the plain product, and only theirs."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.model.decoder import product


def _problem(shape: tuple[int, ...], columns: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal(shape), rng.standard_normal((shape[-1], columns))
    return jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32)


@pytest.mark.parametrize("columns", [1, 40, 16 * 24, 16 * 24 + 1])
@pytest.mark.parametrize("inner", [24, 32, 7, 10])
@pytest.mark.parametrize("rows", [(1,), (2,), (3,), (8,), (33,), (2, 1), (1, 1), ()])
def test_every_form_is_the_plain_product(rows, inner, columns):
    x, weight = _problem((*rows, inner), columns)
    found = jax.jit(product)(x, weight)
    np.testing.assert_allclose(found, np.asarray(x) @ np.asarray(weight), rtol=1e-5, atol=1e-5)
    assert found.shape == (*rows, columns) and found.dtype == x.dtype


def test_bfloat16_stays_bfloat16():
    x, weight = (each.astype(jnp.bfloat16) for each in _problem((1, 24), 40))
    found = jax.jit(product)(x, weight)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, jax.jit(jnp.matmul)(x, weight))


@pytest.mark.parametrize(("columns", "split"), [(40, True), (16 * 24 + 1, False)])
def test_one_row_is_summed_in_parts_on_cpus_alone(columns, split):
    arguments = _problem((1, 24), columns)
    for platform in ("cpu", "tpu", "cuda"):
        text = jax.export.export(jax.jit(product), platforms=[platform])(*arguments).mlir_module()
        assert ("batching_dims" in text) == (split and platform == "cpu"), platform
