"""The C++ products of float32 rows, with the instructions of newer and of older processors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.native import SETS, needs_compiler, suffix

from pallas_kernels.cpu.float_products import float_product

pytestmark = [
    needs_compiler,
    pytest.mark.parametrize("transposed", [False, True]),
    pytest.mark.parametrize("name", SETS),
]


def _problem(rows, inputs, outputs, transposed, seed=0):
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((rows, inputs)), rng.standard_normal((inputs, outputs))
    x, weight = x * 10.0 ** rng.integers(-6, 6, (rows, 1)), weight * 10.0 ** rng.integers(-6, 6, outputs)
    return jnp.asarray(x, jnp.float32), jnp.asarray(weight.T if transposed else weight, jnp.float32)


def _product(name, transposed):
    return functools.partial(float_product, transposed=transposed, suffix=suffix("float_products", name))


@given(rows=st.integers(1, 150), inputs=st.integers(1, 2200), outputs=st.integers(1, 150), seed=st.integers(0, 2**30))
@settings(max_examples=30, deadline=None)
def test_products_are_exact_but_for_rounding(name, transposed, rows, inputs, outputs, seed):
    x, weight = _problem(rows, inputs, outputs, transposed, seed)
    a, b = np.asarray(x, np.float64), np.asarray(weight.T if transposed else weight, np.float64)
    found = np.asarray(_product(name, transposed)(x, weight))
    assert (np.abs(found - a @ b) <= 1e-6 * (np.abs(a) @ np.abs(b))).all()


@pytest.mark.parametrize("shape", [(19, 100, 70), (8, 576, 96), (6, 40, 5), (32, 17, 131), (9, 1300, 50)])
def test_a_row_is_what_it_is_alone_in_any_transformation(name, transposed, shape):
    x, weight = _problem(*shape, transposed)
    product = _product(name, transposed)
    together = product(x, weight)
    for count in (1, 2, 3, 5):
        for first in range(0, len(x) - count, 4):
            rows = slice(first, first + count)
            np.testing.assert_array_equal(product(x[rows], weight), together[rows])
    each = jax.vmap(product, (0, None))(x[:, None], weight)
    np.testing.assert_array_equal(each[:, 0], together)
    looped = jax.jit(lambda x: jax.lax.map(lambda row: product(row[None], weight)[0], x))(x)
    np.testing.assert_array_equal(looped, together)


@pytest.mark.parametrize("shape", [(200, 100, 70), (131, 2100, 96), (64, 24, 5), (75, 17, 131)])
def test_one_of_many_rows_is_the_same_beside_any(name, transposed, shape):
    """From 33 rows on the matrix is copied, and inputs are added in another order than for fewer."""
    x, weight = _problem(*shape, transposed)
    product = _product(name, transposed)
    together = product(x, weight)
    for count in (33, 40, 64):
        for first in (0, 1, len(x) - count):
            rows = slice(first, first + count)
            np.testing.assert_array_equal(product(x[rows], weight), together[rows])


@pytest.mark.parametrize("count", [12, 50])
@pytest.mark.parametrize("outputs", [30, 96])
def test_what_is_not_finite_stays_in_its_row_and_its_output(name, transposed, outputs, count):
    x, weight = _problem(count, 70, outputs, transposed)
    product = _product(name, transposed)
    clean = np.asarray(product(x, weight))
    row = np.asarray(product(x.at[3, 5].set(jnp.nan).at[9, 69].set(-jnp.inf), weight))
    assert not np.isfinite(row[[3, 9]]).any()
    np.testing.assert_array_equal(np.delete(row, [3, 9], 0), np.delete(clean, [3, 9], 0))
    column = np.asarray(product(x, weight.at[(7, 69) if transposed else (69, 7)].set(jnp.inf)))
    assert not np.isfinite(column[:, 7]).any()
    np.testing.assert_array_equal(np.delete(column, 7, 1), np.delete(clean, 7, 1))


@pytest.mark.parametrize("count", [20, 61])
def test_rows_of_zeros_give_zeros_and_change_no_other_row(name, transposed, count):
    """Of many rows, those of padding are not multiplied."""
    x, weight = _problem(count, 1100, 70, transposed)
    padding = np.r_[0:3, 8:16, 17, 40 : count - 2] if count > 40 else np.r_[0:9, 17]
    zero = np.where(np.arange(1100) % 2, 0.0, -0.0)
    found = np.asarray(_product(name, transposed)(x.at[padding].set(zero), weight))
    whole = np.asarray(_product(name, transposed)(x, weight))
    assert not found[padding].any()
    np.testing.assert_array_equal(np.delete(found, padding, 0), np.delete(whole, padding, 0))
    if count > 40:  # infinity times zero is no number: where it is zero, nothing was multiplied
        infinite = np.asarray(_product(name, transposed)(x.at[padding].set(zero), jnp.full_like(weight, jnp.inf)))
        assert not infinite[8:16].any() and not infinite[40:56].any() and not np.isfinite(infinite[20]).any()
    last = jnp.zeros_like(x).at[-1, -1].set(2.0)
    weights = np.asarray(weight)[:, -1] if transposed else np.asarray(weight)[-1]
    np.testing.assert_allclose(_product(name, transposed)(last, weight)[-1], 2 * weights, rtol=1e-6)


def test_no_rows_no_inputs_and_no_outputs(name, transposed):
    for rows, inputs, outputs in ((0, 8, 4), (3, 0, 4), (3, 8, 0)):
        found = _product(name, transposed)(*_problem(rows, inputs, outputs, transposed))
        np.testing.assert_array_equal(found, np.zeros((rows, outputs), np.float32))


def test_shapes_that_do_not_fit_are_refused(name, transposed):
    x, weight = _problem(2, 8, 4, transposed)
    with pytest.raises(jax.errors.JaxRuntimeError, match="other inputs"):
        jax.block_until_ready(_product(name, transposed)(x[:, :7], weight))
