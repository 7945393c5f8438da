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
