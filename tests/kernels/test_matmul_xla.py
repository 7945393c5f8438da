"""The layout of quantised matrices, and the forms of their products that XLA compiles."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.matmul_base import Case, MatmulBase, build

from pallas_kernels.quantised_matmul import integers, quantised_matmul, reference, tpu, weight_tiles, xla


class _Anywhere(MatmulBase):
    """Forms that have no sizes of their own; where activations are bfloat16, weights are rounded to it."""

    tolerance: ClassVar = {"float32": 2e-5, "bfloat16": 2e-2}

    def test_eight_bits(self):
        for minimum in (False, True):
            self.check(Case(bits=8, group=32, minimum=minimum))
        self.check(Case(bits=8, group=16, scale=jnp.float32, inputs=96))

    def test_inputs_that_no_tile_of_128_divides(self):
        for inputs, group in ((576, 64), (576, 32), (32, 32), (96, 32)):
            self.check(Case(inputs=inputs, outputs=6, group=group, rows=2, minimum=True))

    def test_many_rows(self):
        self.check(Case(rows=80, minimum=True))

    def test_no_rows(self):
        assert self.run(build(Case(rows=0))).shape == (0, 256)


def _fp8(problem):
    """The problem of 8 bits with numbers that are float8 by their bits."""
    values = jnp.where(problem.values == 127, 0, problem.values)
    return dataclasses.replace(problem, values=jnp.where(values == -1, 0, values).astype(jnp.int8), fp8=True)


def test_float8_numbers_are_left_to_xla():
    problem = _fp8(build(Case(bits=8, group=32, scale=jnp.float32)))
    for form in (integers, tpu):
        with pytest.raises(NotImplementedError, match="whole numbers, not float8"):
            form.quantised_matmul(problem)
    want = reference.quantised_matmul(problem)
    for implementation in (None, "xla"):
        got = quantised_matmul(problem.x, problem.values, problem.scale, fp8=True, implementation=implementation)
        assert np.abs(got - want).max() < 2e-5 * want.std()
    four = build(Case())
    with pytest.raises(ValueError, match="bits of float8 numbers as int8"):
        quantised_matmul(four.x, four.values, four.scale, fp8=True)
    with pytest.raises(ValueError, match="Places of float4 numbers are uint8"):
        quantised_matmul(problem.x, problem.values, problem.scale, fp4=True)


def test_float4_numbers():
    place = np.arange(-7, 8, dtype=np.int8)
    want = [-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12]
    for kind in (np.int8, np.int32, jnp.bfloat16, np.float32):
        assert weight_tiles.fp4_numbers(jnp.asarray(place).astype(kind)).tolist() == want
    assert weight_tiles.fp4_numbers(place).tolist() == want and weight_tiles.fp4_numbers(place).dtype == np.int8
    problem = build(Case(rows=2, fp4=True, group=32))
    arrays = problem.x, problem.values, problem.scale
    np.testing.assert_array_equal(quantised_matmul(*arrays, fp4=True), integers.quantised_matmul(problem))


class TestXla(_Anywhere):
    def run(self, problem):
        return jax.jit(xla.quantised_matmul)(problem)


class TestIntegers(_Anywhere):
    """Against the reference with activations rounded as this form says it rounds them."""

    def run(self, problem):
        return jax.jit(integers.quantised_matmul)(problem)

    def check(self, case):
        problem = build(case)
        grouped = np.asarray(problem.x, np.float64).reshape(case.rows, -1, case.group)
        step = np.abs(grouped).max(axis=-1, keepdims=True) / 127
        rounded = (np.rint(grouped / step) * step).reshape(problem.x.shape)
        got, exact = np.asarray(self.run(problem)), reference.quantised_matmul(problem)
        want = reference.quantised_matmul(dataclasses.replace(problem, x=jnp.asarray(rounded)))
        if case.rows:  # a number near a half of a step may be rounded the other way in float32
            assert np.sqrt(((got - want) ** 2).mean()) < 2e-3 * exact.std()
            assert 2e-3 * exact.std() < np.sqrt(((got - exact) ** 2).mean()) < 2e-2 * exact.std()

    @pytest.mark.parametrize("rows", [2, 80])
    def test_where_a_minimum_is_added_does_not_count(self, rows):
        """Numbers 16 lower with minima 16 scales higher are the same weights, and rounding costs them the same."""
        problem = build(Case(rows=rows, bits=8, group=32, minimum=True, scale=jnp.float32))
        whole = weight_tiles.unpacked(problem.values).astype(jnp.int32) % 32
        low, high = (jnp.asarray(weight_tiles.packed(np.asarray(x, np.int8), 8, 32)) for x in (whole - 16, whole))
        centred = dataclasses.replace(problem, values=low, minimum=problem.minimum + 16 * problem.scale)
        one, other = (np.asarray(self.run(p)) for p in (centred, dataclasses.replace(problem, values=high)))
        np.testing.assert_allclose(one, other, atol=1e-4 * one.std())

    def test_a_row_is_what_it_is_alone_whatever_is_beside_it(self):
        problem = build(Case(rows=9, group=32, minimum=True))
        together = self.run(problem)
        for i in range(9):
            alone = self.run(dataclasses.replace(problem, x=problem.x[i : i + 1]))
            np.testing.assert_allclose(alone[0], together[i], rtol=1e-5, atol=1e-4)

    def test_many_rows_are_rounded_as_few_are(self):
        problem = build(Case(rows=80, group=64, minimum=True))
        few = self.run(dataclasses.replace(problem, x=problem.x[:4]))
        np.testing.assert_allclose(self.run(problem)[:4], few, rtol=1e-4, atol=1e-3)

    def test_zeros_give_zeros_and_what_is_not_finite_stays_so(self):
        problem = build(Case(rows=3))
        x = problem.x.at[0].set(0).at[1, 3].set(jnp.nan)
        found = np.asarray(self.run(dataclasses.replace(problem, x=x)))
        assert not found[0].any() and np.isnan(found[1]).all() and np.isfinite(found[2]).all()


def test_cpus_multiply_integers():
    problem = build(Case(rows=2, minimum=True))
    arrays = problem.x, problem.values, problem.scale, problem.minimum
    np.testing.assert_array_equal(quantised_matmul(*arrays), integers.quantised_matmul(problem))


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([4, 8]), st.integers(1, 4), st.integers(1, 12), st.sampled_from([32, 64]), st.booleans())
def test_packing_loses_nothing(bits, pairs, groups, group, stacked):
    stack = (2,) if stacked else ()
    least = -8 if bits == 4 else -128
    whole = np.random.default_rng(0).integers(least, -least, (*stack, 2 * pairs, groups * group)).astype(np.int8)
    values = weight_tiles.packed(whole, bits, group)
    assert values.nbytes * 8 == whole.size * bits
    np.testing.assert_array_equal(values, weight_tiles.packed(jnp.asarray(whole), bits, group))
    np.testing.assert_array_equal(weight_tiles.unpacked(jnp.asarray(values)), whole)
    index = np.array([2 * pairs - 1, 0, 1])
    one, plain = (values[0], whole[0]) if stacked else (values, whole)
    np.testing.assert_array_equal(weight_tiles.rows(jnp.asarray(one), jnp.asarray(index)), plain[index])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": jnp.ones((3, 200))}, r"x is float32\[3, 200\]; give a float array of shape \[any, 256\]"),
        ({"values": jnp.ones((2, 128, 128))}, "values is float32"),
        ({"scale": jnp.ones((2, 255))}, r"scale is float32\[2, 255\]"),
        ({"scale": jnp.ones((3, 256))}, "scale has 3 groups of 256 inputs; give groups that divide 128"),
        ({"minimum": jnp.ones((3, 256))}, "minimum is float32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, said):
    problem = build(Case())
    given = {"x": problem.x, "values": problem.values, "scale": problem.scale, "minimum": None} | change
    with pytest.raises(ValueError, match=said):
        quantised_matmul(**given)
