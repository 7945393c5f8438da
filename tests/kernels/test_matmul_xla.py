"""The layout of quantised matrices, and the forms of their products that XLA compiles."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.matmul_base import AnywhereBase, Case, RoundedBase, build

from pallas_kernels.quantised_matmul import integers, quantised_matmul, reference, tpu, weight_tiles, xla


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
    found = quantised_matmul(*arrays, fp4=True, implementation="integers")
    np.testing.assert_array_equal(found, integers.quantised_matmul(problem))


class TestXla(AnywhereBase):
    def run(self, problem):
        return jax.jit(xla.quantised_matmul)(problem)


class TestIntegers(RoundedBase):
    def run(self, problem):
        return jax.jit(integers.quantised_matmul)(problem)

    def test_a_row_is_what_it_is_alone_whatever_is_beside_it(self):
        self.check_rows_alone(9, rtol=1e-5, atol=1e-4)

    def test_many_rows_are_rounded_as_few_are(self):
        problem = build(Case(rows=80, group=64, minimum=True))
        few = self.run(dataclasses.replace(problem, x=problem.x[:4]))
        np.testing.assert_allclose(self.run(problem)[:4], few, rtol=1e-4, atol=1e-3)


def test_cpus_multiply_integers_where_nothing_is_compiled(monkeypatch):
    monkeypatch.setenv("KVJAX_NATIVE", "0")
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
