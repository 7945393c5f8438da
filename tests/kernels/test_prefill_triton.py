"""The GPU kernel of prefill: results in interpret mode, and that it lowers for a GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest
from support.gpus import H100, on
from support.prefill_base import Case, PrefillBase, build

from pallas_kernels.prefill import triton

# JAX 0.11 announced the end of this backend.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")

pytest.importorskip("jax.experimental.pallas.triton", reason="this JAX has no Pallas Triton backend")

SMALL = triton.Config(queries=64, keys=64)


class TestTriton(PrefillBase):
    def run(self, problem):
        return jax.jit(functools.partial(triton.prefill, config=SMALL, interpret=True))(problem)


@pytest.mark.parametrize(("head_dim", "dtype"), [(80, jnp.bfloat16), (128, jnp.float32)])
def test_lowers_for_a_gpu(head_dim, dtype):
    problem = build(Case((0, 1024), queries=256, keys=2048, group=4, head_dim=head_dim, dtype=dtype))
    allowed = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    with on(*H100):  # whose sizes JAX 0.12 asks for
        exported = jax.export.export(jax.jit(triton.prefill), platforms=["cuda"], disabled_checks=allowed)(problem)
    assert exported.mlir_module().count("__gpu$xla.gpu.triton") == 1
