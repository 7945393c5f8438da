"""The C++ products for CPUs: the numbers of XLA's own form, with the instructions of newer and of older processors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.native import SETS, needs_compiler, needs_native, suffix

from kvjax.model import quantised_matmul as own
from kvjax.model.matmul import matmul
from kvjax.model.quantised import quantised, rounded
from pallas_kernels.cpu import products

RNG = np.random.default_rng(5)


def _problem(rows, inputs, outputs, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs)) * 10.0 ** rng.integers(-6, 6, (rows, 1))
    values = rng.integers(-128, 128, (outputs, inputs))
    return jnp.asarray(x, jnp.float32), jnp.asarray(values, jnp.int8), jnp.asarray(rng.random(outputs), jnp.float32)


def _oracle(x, values, scale):
    whole, step = rounded(np.asarray(x))
    sums = whole.astype(np.int64) @ np.asarray(values, np.int64).T
    return sums.astype(np.float32) * step * np.asarray(scale)


@needs_compiler
@pytest.mark.parametrize("name", SETS)
@given(rows=st.integers(1, 40), inputs=st.integers(1, 200), outputs=st.integers(1, 150), seed=st.integers(0, 2**30))
@settings(max_examples=30, deadline=None)
def test_coarse_products_are_those_of_rounded_activations_to_the_last_bit(name, rows, inputs, outputs, seed):
    problem = _problem(rows, inputs, outputs, seed)
    found = products.int8_product(*problem, suffix=suffix("products", name))
    np.testing.assert_array_equal(found, _oracle(*problem))


@needs_compiler
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("shape", [(1, 576, 960), (3, 63, 17), (8, 1536, 40), (21, 130, 33), (300, 64, 16)])
def test_fine_products_are_xlas_but_for_what_is_halfway_between_two_numbers(name, shape):
    problem = _problem(*shape)
    found = products.int8_product(*problem, fine=True, suffix=suffix("products", name))
    wanted = np.asarray(own._fine(*problem))
    assert (np.abs(found - wanted) <= 2e-4 * np.abs(wanted).max(axis=1, keepdims=True)).all()


@needs_compiler
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("fine", [True, False])
def test_a_row_is_what_it_is_alone_in_any_transformation(name, fine):
    x, values, scale = _problem(19, 100, 70)
    product = functools.partial(products.int8_product, fine=fine, suffix=suffix("products", name))
    together = product(x, values, scale)
    for i in range(19):
        np.testing.assert_array_equal(product(x[i : i + 1], values, scale)[0], together[i])
    each = jax.vmap(product, (0, None, None))(x[:, None], values, scale)
    np.testing.assert_array_equal(each[:, 0], together)
    looped = jax.jit(lambda x: jax.lax.map(lambda row: product(row[None], values, scale)[0], x))(x)
    np.testing.assert_array_equal(looped, together)


@needs_compiler
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("fine", [True, False])
@pytest.mark.parametrize("count", [5, 43])
def test_rows_of_zeros_give_zeros_and_change_no_other_row(name, fine, count):
    """Of many rows, those of padding are not multiplied."""
    x, values, scale = _problem(count, 100, 70)
    padding = np.r_[0:3, 8:16, 17, 32 : count - 1] if count > 32 else np.r_[0:2]
    product = functools.partial(products.int8_product, fine=fine, suffix=suffix("products", name))
    found, whole = np.asarray(product(x.at[padding].set(0), values, scale)), np.asarray(product(x, values, scale))
    assert not found[padding].any()
    np.testing.assert_array_equal(np.delete(found, padding, 0), np.delete(whole, padding, 0))
    if count > 32:  # infinity times zero is no number: where it is zero, nothing was multiplied
        infinite = np.asarray(product(x.at[padding].set(0), values, jnp.full_like(scale, jnp.inf)))
        assert not infinite[8:16].any() and not infinite[32:40].any() and not np.isfinite(infinite[20]).any()


@needs_compiler
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("fine", [True, False])
def test_what_is_not_finite_stays_in_its_row(name, fine):
    x, values, scale = _problem(12, 70, 30)
    bad = x.at[3, 5].set(jnp.nan).at[9, 69].set(-jnp.inf).at[10].set(0)
    found = np.asarray(products.int8_product(bad, values, scale, fine=fine, suffix=suffix("products", name)))
    clean = np.asarray(products.int8_product(x, values, scale, fine=fine, suffix=suffix("products", name)))
    assert not np.isfinite(found[[3, 9]]).any() and not found[10].any()
    rest = [i for i in range(12) if i not in (3, 9, 10)]
    np.testing.assert_array_equal(found[rest], clean[rest])


@needs_compiler
def test_shapes_that_do_not_fit_are_refused():
    x, values, scale = _problem(2, 8, 4)
    with pytest.raises(jax.errors.JaxRuntimeError, match="other inputs"):
        jax.block_until_ready(products.int8_product(x, values[:, :7], scale, suffix=suffix("products", "here")))


@needs_native
def test_cpus_multiply_by_it_unless_it_is_switched_off(monkeypatch):
    weight, x = quantised(jnp.asarray(RNG.standard_normal((40, 24)), jnp.float32), jnp.float32), jnp.ones((3, 24))
    text = jax.jit(lambda x: matmul(x, weight)).lower(x).as_text()
    assert "kvjax_int8_product" in text
    for word in ("0", "Off"):
        monkeypatch.setenv("KVJAX_NATIVE", word)
        text = jax.jit(lambda x: matmul(x, weight)).lower(x).as_text()
        assert "custom_call" not in text and "dot_general" in text
