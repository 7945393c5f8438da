"""The C++ products with numbers in groups, with the instructions of newer and of older processors."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.matmul_base import Case, RoundedBase, build
from support.native import SETS, needs_compiler, needs_native, suffix

from kvjax.model.quantised import rounded
from pallas_kernels.quantised_matmul import integers, native, quantised_matmul, reference

_LONG = {
    "x": jnp.ones((1, 1 << 17)), "values": jnp.ones((1, 1, 1 << 17), jnp.int8), "scale": jnp.ones((1, 1), jnp.float32),
}  # fmt: skip
_SCALES = jnp.float32, jnp.bfloat16, jnp.int16


def _run(problem, instructions):
    own = suffix("group_products", instructions)
    return jax.jit(lambda problem: native.quantised_matmul(problem, suffix=own))(problem)


def _oracle(problem):
    """The reference with activations as NumPy rounds them."""
    x = np.asarray(problem.x.astype(jnp.float32))
    whole, step = rounded(x.reshape(len(x), -1, problem.group))
    # In float64: the products of numbers and their steps are not rounded again.
    weights = reference.weights(problem)
    return (whole.astype(np.float64) * step).reshape(x.shape) @ weights.T


@needs_compiler
class TestNative(RoundedBase):
    @pytest.fixture(autouse=True, params=SETS)
    def _instructions(self, request):
        self.instructions = request.param

    def run(self, problem):
        return _run(problem, self.instructions)

    def test_a_row_is_what_it_is_alone_to_the_last_bit(self):
        for count in (2, 3, 4, 9, 21):
            self.check_rows_alone(count)

    @pytest.mark.parametrize("bits", [4, 8])
    def test_rows_of_zeros_give_zeros_and_change_no_other_row(self, bits):
        """Of many rows, those of padding are not multiplied."""
        problem = build(Case(rows=29, group=32, outputs=40, bits=bits, minimum=True))
        padding = np.r_[0:3, 8:16, 24:28]
        padded = dataclasses.replace(problem, x=problem.x.at[padding].set(0))
        found, whole = np.asarray(self.run(padded)), np.asarray(self.run(problem))
        assert not found[padding].any()
        np.testing.assert_array_equal(np.delete(found, padding, 0), np.delete(whole, padding, 0))
        # Infinity times zero is no number: where it is zero, nothing was multiplied.
        infinite = np.asarray(self.run(dataclasses.replace(padded, scale=jnp.full_like(problem.scale, jnp.inf))))
        assert not infinite[8:16].any() and np.isnan(infinite[0]).all() and not np.isfinite(infinite[20]).any()

    def test_no_rows(self):
        with pytest.raises(NotImplementedError, match="a row and an output at least"):
            self.run(build(Case(rows=0)))
        problem = build(Case(rows=0))
        assert quantised_matmul(problem.x, problem.values, problem.scale).shape == (0, 256)

    def test_in_any_transformation(self):
        problem = build(Case(rows=6, group=32, outputs=40))
        own = suffix("group_products", self.instructions)

        def product(x):
            return native.quantised_matmul(dataclasses.replace(problem, x=x), suffix=own)

        together = product(problem.x)
        np.testing.assert_array_equal(jax.vmap(product)(problem.x[:, None])[:, 0], together)
        looped = jax.jit(lambda x: jax.lax.map(lambda row: product(row[None])[0], x))(problem.x)
        np.testing.assert_array_equal(looped, together)


@needs_compiler
@pytest.mark.parametrize("name", SETS)
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_products_are_those_of_rounded_activations(name, data):
    bits, group = data.draw(st.sampled_from([4, 8])), data.draw(st.sampled_from([16, 32, 48, 64, 112, 128]))
    case = Case(
        rows=data.draw(st.integers(1, 30)),
        inputs=group * data.draw(st.integers(1, 9)),
        outputs=data.draw(st.integers(1, 60)) * (8 // bits),
        bits=bits,
        group=group,
        minimum=data.draw(st.booleans()),
        scale=data.draw(st.sampled_from(_SCALES)),
    )
    case = dataclasses.replace(case, fp4=bits == 4 and not case.minimum and data.draw(st.booleans()))
    problem = build(case, data.draw(st.integers(0, 2**30)))
    wanted = _oracle(problem)
    size = np.abs(np.asarray(problem.x, np.float64)) @ np.abs(reference.weights(problem)).T
    assert (np.abs(_run(problem, name) - wanted) <= 2e-6 * size + 1e-6).all()


@needs_compiler
@pytest.mark.parametrize("name", SETS)
def test_the_least_and_the_largest_numbers_do_not_overflow(name):
    for bits, least in ((8, -128), (4, -8)):
        problem = build(Case(rows=9, bits=bits, inputs=128))
        full = np.full(problem.values.shape, least if bits == 8 else 0x88).astype(problem.values.dtype)
        ones = jnp.ones_like(problem.scale)
        one = dataclasses.replace(problem, x=jnp.ones_like(problem.x), values=jnp.asarray(full), scale=ones)
        np.testing.assert_allclose(_run(one, name), np.full((9, 256), 128.0 * least), rtol=1e-6)


@needs_compiler
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("rows", [1, 7])
def test_what_is_not_finite_stays_in_its_row_and_so_does_a_scale_in_its_output(name, rows):
    problem = build(Case(rows=rows, group=32, outputs=38, scale=jnp.float32))
    clean = np.asarray(_run(problem, name))
    bad = dataclasses.replace(problem, scale=problem.scale.at[1, 5].set(jnp.nan))
    found = np.asarray(_run(bad, name))
    assert np.isnan(found[:, 5]).all()
    np.testing.assert_array_equal(np.delete(found, 5, axis=1), np.delete(clean, 5, axis=1))
    infinite = dataclasses.replace(problem, x=problem.x.at[0, 40].set(jnp.inf))
    found = np.asarray(_run(infinite, name))
    assert not np.isfinite(found[0]).any()
    np.testing.assert_array_equal(found[1:], clean[1:])


@needs_compiler
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("rows", [1, 7])
def test_large_activations_and_small_scales_do_not_overflow_between(name, rows):
    problem = build(Case(rows=rows, group=32, minimum=True, scale=jnp.float32))
    large = dataclasses.replace(problem, x=problem.x * 1e36, scale=problem.scale * 1e-30, minimum=problem.minimum * 0)
    found = np.asarray(_run(large, name))
    want = _oracle(large)
    assert np.abs(found - want).max() < 1e-5 * want.std()


def test_what_it_cannot_do_is_left_to_other_forms():
    for case, changes, words in (
        (Case(bits=8, group=32), {"fp8": True}, "whole numbers, not float8"),
        (Case(bits=8, inputs=24, group=8), {}, "groups in multiples of 16"),
        (Case(bits=8, rows=1, outputs=1), _LONG, "up to 65,536"),
        (Case(bits=8), {"scale": jnp.ones((2, 256), jnp.float16)}, "scales of float32, bfloat16"),
        (Case(bits=8), {"values": jnp.ones((2, 256, 128), jnp.int32)}, "numbers of int8 or uint8"),
    ):
        problem = dataclasses.replace(build(case), **changes)
        with pytest.raises(NotImplementedError, match=words):
            native.quantised_matmul(problem, suffix="_none")


@needs_compiler
def test_shapes_that_do_not_fit_are_refused():
    problem = build(Case(rows=1))
    wrong = dataclasses.replace(problem, x=problem.x[:, :192])
    with pytest.raises(jax.errors.JaxRuntimeError, match="other inputs"):
        jax.block_until_ready(_run(wrong, "here"))
    for scale in (problem.scale[:, :-1], problem.scale[:, None]):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError)):
            jax.block_until_ready(_run(dataclasses.replace(problem, scale=scale), "here"))
    other = dataclasses.replace(problem, minimum=problem.scale.astype(jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="another shape or type"):
        jax.block_until_ready(_run(other, "here"))


@needs_native
def test_cpus_multiply_by_it_unless_it_is_switched_off(monkeypatch):
    problem = build(Case(rows=3, minimum=True))
    arrays = problem.x, problem.values, problem.scale, problem.minimum
    product = jax.jit(lambda x: quantised_matmul(x, *arrays[1:]))
    assert "kvjax_group_product" in product.lower(problem.x).as_text()
    np.testing.assert_array_equal(quantised_matmul(*arrays), native.quantised_matmul(problem))
    monkeypatch.setenv("KVJAX_NATIVE", "0")
    text = jax.jit(lambda x: quantised_matmul(x, *arrays[1:])).lower(problem.x).as_text()
    assert "custom_call" not in text
    np.testing.assert_array_equal(quantised_matmul(*arrays), integers.quantised_matmul(problem))
