"""The TPU kernels of attention mass: results and races in interpret mode, and that they lower for a TPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from support.mass_base import Case, MassBase, build

from pallas_kernels.attention_mass import reference, tpu
from pallas_kernels.attention_mass.mass_problem import Counting
from pallas_kernels.tpu import tiles

SMALL = tpu.Config(queries=128, keys=128)


class TestTpu(MassBase):
    def log_sum_exp(self, problem):
        return tpu.log_sum_exp(problem, config=SMALL, interpret=True)

    def attention_mass(self, problem, counting):
        return tpu.attention_mass(problem, counting, config=SMALL, interpret=True)


class TestFasterProducts(TestTpu):
    """As compiled for chips whose products are faster than what becomes of them."""

    @pytest.fixture(autouse=True)
    def chip(self, monkeypatch):
        monkeypatch.setattr(tiles, "matrix_unit", lambda: 256)


@pytest.mark.slow
@pytest.mark.parametrize("unit", [128, 256])
@pytest.mark.parametrize(("dtype", "head_dim"), [(jnp.float32, 64), (jnp.float32, 256), (jnp.bfloat16, 128)])
def test_blocks_of_several_parts(unit, dtype, head_dim, monkeypatch):
    """Blocks of 2,048 keys, most below the diagonal and one that it crosses, for several blocks of several heads."""
    monkeypatch.setattr(tiles, "matrix_unit", lambda: unit)
    problem, counting = build(
        Case((5000, 0), queries=256, keys=6144, heads=1, group=3, head_dim=head_dim, dtype=dtype, onto=True)
    )
    config = tpu.Config(queries=128, keys=2048)
    tolerance = MassBase.tolerance[jnp.dtype(dtype).name]
    lse = jax.jit(lambda p: tpu.log_sum_exp(p, config=config, interpret=True))(problem)
    np.testing.assert_allclose(lse, counting.lse, atol=tolerance, rtol=tolerance)
    mass = jax.jit(lambda p, c: tpu.attention_mass(p, c, config=config, interpret=True))(problem, counting)
    np.testing.assert_allclose(mass.new, reference.attention_mass(problem, counting)[0], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("unit", [128, 256])
def test_a_query_that_is_no_number_is_no_other_querys(unit, monkeypatch):
    """What holds products back is a zero even where sums of weights are no numbers."""
    monkeypatch.setattr(tiles, "matrix_unit", lambda: unit)
    problem, counting = build(Case((5000,), queries=128, keys=6144, heads=1, group=2, head_dim=128, dtype=jnp.bfloat16))
    broken = dataclasses.replace(problem, q=problem.q.at[0, 0, 0, 32:48].set(jnp.nan))
    lse = tpu.log_sum_exp(broken, config=tpu.Config(queries=128, keys=2048), interpret=True)
    others = np.r_[:32, 48:128]
    np.testing.assert_allclose(lse[0, 0, 0, others], counting.lse[0, 0, 0, others], atol=2e-2)
    np.testing.assert_allclose(lse[0, 0, 1], counting.lse[0, 0, 1], atol=2e-2)


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


@pytest.mark.slow
def test_queries_that_are_no_whole_blocks_are_not_copied():
    """Those of the last, broken block are; both calls together are the reference."""
    problem, counting = build(Case((0, 700), queries=300, keys=1024, head_dim=128, onto=True))
    lse = tpu.log_sum_exp(problem, config=SMALL, interpret=True)
    np.testing.assert_allclose(lse, counting.lse, atol=3e-5)
    mass = tpu.attention_mass(problem, counting, config=SMALL, interpret=True)
    np.testing.assert_allclose(mass.new, reference.attention_mass(problem, counting)[0], atol=3e-5)
    text = str(jax.make_jaxpr(lambda p: tpu.log_sum_exp(p, config=SMALL, interpret=True))(problem))
    assert "2,2,2,384,128" not in text


def test_float16_is_the_xla_forms():
    problem, counting = build(Case((0, 40), dtype=jnp.float16))
    for run in (tpu.log_sum_exp, lambda p: tpu.attention_mass(p, counting)):
        with pytest.raises(NotImplementedError, match="float32 or bfloat16 keys, not float16"):
            run(problem)
