"""The TPU kernels of attention mass: results and races in interpret mode, and that they lower for a TPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kernels.mass_base import Case, MassBase, build

from pallas_kernels.attention_mass import reference, tpu
from pallas_kernels.attention_mass.problem import Counting

SMALL = tpu.Config(queries=128, keys=128)


class TestTpu(MassBase):
    def log_sum_exp(self, problem):
        return tpu.log_sum_exp(problem, config=SMALL, interpret=True)

    def attention_mass(self, problem, counting):
        return tpu.attention_mass(problem, counting, config=SMALL, interpret=True)


def test_no_race_and_no_memory_read_that_was_not_written():
    """Several blocks of queries and of keys, some above the diagonal, one of which no query counts."""
    problem, counting = build(Case((0, 90), queries=256, keys=384, heads=1, head_dim=128))
    counting = dataclasses.replace(counting, weight=counting.weight.at[:, 128:].set(0))
    mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    try:
        lse = tpu.log_sum_exp(problem, config=SMALL, interpret=mode)
        mass = tpu.attention_mass(problem, counting, config=SMALL, interpret=mode)
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

        assert interpreter.races is not None and not interpreter.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    np.testing.assert_allclose(lse, counting.lse, atol=3e-5)
    np.testing.assert_allclose(mass.new, reference.attention_mass(problem, counting)[0], atol=3e-5)


@pytest.mark.parametrize(("dtype", "x64"), [(jnp.bfloat16, False), (jnp.float32, True)], ids=["bfloat16", "x64"])
def test_lowers_for_a_tpu(dtype, x64):
    with jax.enable_x64(x64):
        problem, _ = build(Case((0, 40), queries=32, keys=2048, group=4, head_dim=128, dtype=dtype))

        def both(p):
            return tpu.attention_mass(p, Counting(tpu.log_sum_exp(p), None, None)).new

        exported = jax.export.export(jax.jit(both), platforms=["tpu"])(problem)
    assert exported.mlir_module().count("tpu_custom_call") == 2
