"""The TPU kernel of prefill: results and races in interpret mode, and that it lowers for a TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from support.prefill_base import Case, PrefillBase, build

from pallas_kernels.prefill import prefill, reference, tpu
from pallas_kernels.tpu import tiles

SMALL = tpu.Config(queries=128, keys=128)


class TestTpu(PrefillBase):
    def run(self, problem):
        return jax.jit(functools.partial(tpu.prefill, config=SMALL, interpret=True))(problem)


def test_no_race_and_no_memory_read_that_was_not_written():
    """Several blocks of queries and of keys, some above the diagonal, one of which is padding."""
    problem = build(Case((0, 90), length=(256, 100), queries=256, keys=384, heads=1, head_dim=128))
    try:
        mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
        got = tpu.prefill(problem, config=SMALL, interpret=mode)
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

        assert interpreter.races is not None and not interpreter.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    want, lse = reference.prefill(problem)
    np.testing.assert_allclose(got.out[0], want[0], atol=3e-5)
    np.testing.assert_allclose(got.out[1, :, :, :100], want[1, :, :, :100], atol=3e-5)
    np.testing.assert_allclose(got.lse[0], lse[0], atol=3e-5)


@pytest.mark.parametrize(("head_dim", "dtype", "x64"), [(64, jnp.bfloat16, False), (128, jnp.float32, True)])
def test_lowers_for_a_tpu(head_dim, dtype, x64):
    with jax.enable_x64(x64):
        problem = build(Case((0, 1024), queries=256, keys=2048, group=4, head_dim=head_dim, dtype=dtype))
        exported = jax.export.export(jax.jit(tpu.prefill), platforms=["tpu"])(problem)
    assert exported.mlir_module().count("tpu_custom_call") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize(("group", "head_dim"), [(9, 256), (3, 96)])
def test_the_orders_of_chips_with_large_matrix_units(monkeypatch, kind, group, head_dim):
    """Rows of two strips, the second shorter, that follow each other, of one part or of two in turn."""
    monkeypatch.setattr(tiles.dispatch, "device_kind", lambda: kind)
    config = tpu.Config(queries=128, keys=1024, part=512)
    where = (3, 900, -40, -500)  # of some no query or not every one sees a key
    problem = build(Case(where, queries=80, keys=1024, heads=1, group=group, head_dim=head_dim, dtype=jnp.bfloat16))
    got, want = tpu.prefill(problem, config=config, interpret=True), reference.prefill(problem)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, atol=2e-2, rtol=2e-2)


def test_what_no_vmem_holds_is_left_to_xla():
    """A block of 32 heads of 256 float32 channels, whose parts and sums are 73 MB; in bfloat16 they fit."""

    def outputs(dtype, implementation=None):
        q = jax.ShapeDtypeStruct((1, 1, 32, 256, 256), dtype)
        k = jax.ShapeDtypeStruct((1, 1, 4096, 256), dtype)
        return jax.eval_shape(lambda q, k: prefill(q, k, k, offset=0, scale=0.1, implementation=implementation), q, k)

    with pytest.raises(NotImplementedError, match="needs 73 MB of VMEM, of 64"):
        outputs(jnp.float32, "tpu")
    assert outputs(jnp.bfloat16, "tpu").out.shape == outputs(jnp.float32).out.shape


def test_float16_is_the_xla_forms():
    with pytest.raises(NotImplementedError, match="float32 or bfloat16 keys, not float16"):
        tpu.prefill(build(Case((0, 40), dtype=jnp.float16)))
