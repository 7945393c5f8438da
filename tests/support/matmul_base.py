"""What every implementation of ``quantised_matmul`` must do, against the float64 reference; each inherits it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from pallas_kernels.quantised_matmul import reference, weight_tiles
from pallas_kernels.quantised_matmul.matmul_problem import Problem


@dataclasses.dataclass(frozen=True)
class Case:
    """A product by its sizes."""

    rows: int = 3
    inputs: int = 256
    outputs: int = 256
    bits: int = 4
    group: int = 128
    minimum: bool = False
    dtype: Any = jnp.float32
    scale: Any = jnp.bfloat16  #: int16 is float16 by its bits
    fp4: bool = False


def build(case: Case, seed: int = 0) -> Problem:
    """The case with random numbers, the least and the largest among them, and scales of very different sizes."""
    random = np.random.default_rng(seed)
    least, most = (-8, 7) if case.bits == 4 else (-127, 127)
    whole = random.integers(least, most + 1, (case.outputs, case.inputs)).astype(np.int8)
    groups = case.inputs // case.group, case.outputs
    scale = _scales(2.0 ** random.uniform(-6, 2, groups), case.scale)
    minimum = _scales(random.standard_normal(groups), case.scale) if case.minimum else None
    x = jnp.asarray(random.standard_normal((case.rows, case.inputs))).astype(case.dtype)
    values = jnp.asarray(weight_tiles.packed(whole.clip(-7) if case.fp4 else whole, case.bits, case.group))
    return Problem(x, values, scale, minimum, fp4=case.fp4)


def _scales(numbers: np.ndarray, kind: Any) -> Array:
    if kind == jnp.int16:
        return jnp.asarray(numbers.astype(np.float16).view(np.int16))
    return jnp.asarray(numbers).astype(kind)


class MatmulBase:
    """Inherit and give ``run``."""

    #: Of the results' standard deviation.
    tolerance: ClassVar = {"float32": 2e-5, "bfloat16": 1e-4}

    def run(self, problem: Problem) -> Array:
        raise NotImplementedError

    def check(self, case: Case) -> None:
        problem = build(case)
        got, want = np.asarray(self.run(problem)), reference.quantised_matmul(problem)
        assert got.dtype == np.float32 and got.shape == (case.rows, case.outputs)
        off = np.abs(got - want).max() / want.std()
        assert off < self.tolerance[jnp.dtype(case.dtype).name], off

    @pytest.mark.parametrize("group", [32, 64, 128])
    @pytest.mark.parametrize("minimum", [False, True])
    def test_groups_and_minima(self, group, minimum):
        self.check(Case(group=group, minimum=minimum))

    @pytest.mark.parametrize("rows", [1, 2, 8, 17])
    def test_rows(self, rows):
        self.check(Case(rows=rows))

    @pytest.mark.parametrize("scale", [jnp.int16, jnp.float32])
    def test_dtypes(self, scale):
        self.check(Case(dtype=jnp.bfloat16, scale=scale, minimum=True))

    def test_float4(self):
        self.check(Case(group=32, fp4=True))

    def test_many_outputs_and_inputs(self):
        self.check(Case(inputs=640, outputs=768, group=64))


class AnywhereBase(MatmulBase):
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


class RoundedBase(AnywhereBase):
    """Forms that round activations in the weights' groups, against the reference with activations rounded so."""

    def check(self, case: Case) -> None:
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

    def check_rows_alone(self, count: int, rtol: float = 0, atol: float = 0) -> None:
        problem = build(Case(rows=count, group=32, minimum=True))
        together = self.run(problem)
        for i in range(count):
            alone = self.run(dataclasses.replace(problem, x=problem.x[i : i + 1]))
            np.testing.assert_allclose(alone[0], together[i], rtol=rtol, atol=atol)

    def test_zeros_give_zeros_and_what_is_not_finite_stays_so(self):
        problem = build(Case(rows=3))
        x = problem.x.at[0].set(0).at[1, 3].set(jnp.nan)
        found = np.asarray(self.run(dataclasses.replace(problem, x=x)))
        assert not found[0].any() and np.isnan(found[1]).all() and np.isfinite(found[2]).all()
