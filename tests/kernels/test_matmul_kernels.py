"""The TPU and the GPU kernel of products with quantised matrices: results in interpret mode, and that they lower."""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from support.gpus import H100, on
from support.matmul_base import Case, MatmulBase, build

from pallas_kernels.quantised_matmul import reference, tpu
from pallas_kernels.quantised_matmul.matmul_problem import Problem

# JAX 0.11 announced the end of this backend.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
triton = pytest.importorskip("pallas_kernels.quantised_matmul.triton", reason="this JAX has no Pallas Triton backend")


class _Kernel(MatmulBase):
    def test_eight_bits(self):
        self.check(Case(bits=8, group=32, minimum=True))
        self.check(Case(bits=8, group=16, scale=jnp.float32))
        self.check(Case(bits=8, dtype=jnp.bfloat16))


class TestTpu(_Kernel):
    def run(self, problem):
        return jax.jit(functools.partial(tpu.quantised_matmul, interpret=True))(problem)


class TestTriton(_Kernel):
    tolerance: ClassVar = {"float32": 2e-5, "bfloat16": 1e-4}

    def run(self, problem):
        return jax.jit(functools.partial(triton.quantised_matmul, interpret=True))(problem)

    def test_sizes_that_no_block_divides(self):
        self.check(Case(inputs=576, outputs=90, group=64, rows=5, minimum=True))


def test_no_race_and_no_memory_read_that_was_not_written():
    problem = build(Case(group=32, minimum=True, inputs=640))
    try:
        mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
        got = tpu.quantised_matmul(problem, config=tpu.Config(128), interpret=mode)
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

        assert interpreter.races is not None and not interpreter.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    np.testing.assert_allclose(got, reference.quantised_matmul(problem), atol=1e-3)


@pytest.mark.parametrize(("dtype", "x64"), [(jnp.bfloat16, False), (jnp.float32, True)])
def test_they_lower_for_their_chips(dtype, x64):
    with jax.enable_x64(x64):
        problem = build(Case(8, 512, 512, group=32, minimum=True, dtype=dtype, scale=jnp.int16))
        exported = jax.export.export(jax.jit(tpu.quantised_matmul), platforms=["tpu"])(problem)
        assert exported.mlir_module().count("tpu_custom_call") == 1
        allowed = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
        problem = build(Case(8, 512, 512, group=32, dtype=dtype, fp4=True))
        exported = jax.export.export(jax.jit(tpu.quantised_matmul), platforms=["tpu"])(problem)
        assert exported.mlir_module().count("tpu_custom_call") == 1
        with on(*H100):
            made = jax.export.export(jax.jit(triton.quantised_matmul), platforms=["cuda"], disabled_checks=allowed)
            assert made(problem).mlir_module().count("__gpu$xla.gpu.triton") == 1


def test_float16_scales_are_read_by_their_bits():
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)]
    found = tpu.floats_of(jnp.asarray(every.view(np.int16)))
    np.testing.assert_array_equal(found, every.astype(np.float32))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case(rows=86), "1 to 85 rows like these, not 86"),
        (Case(rows=65, group=32, dtype=jnp.bfloat16), "1 to 64 rows like these, not 65"),
        (Case(rows=0), "1 to 85 rows like these, not 0"),
        (Case(inputs=576, group=64), "multiples of 128"),
        (Case(outputs=130), "multiples of 128"),
        (Case(dtype=jnp.float16), "not float16"),
        (Case(scale=jnp.float16), "by their bits"),
    ],
)
def test_what_the_tpu_kernel_leaves_to_xla(case, said):
    with pytest.raises(NotImplementedError, match=said):
        tpu.quantised_matmul(build(case))


def test_gpus_before_ampere_are_left_to_xla():
    problem: Problem = build(Case())
    with on("Tesla T4", 40), pytest.raises(NotImplementedError, match=r"this GPU has 7\.5"):
        triton.quantised_matmul(problem)
