"""The GPU kernels of attention mass: results in interpret mode, and that they lower for a GPU."""

import jax
import jax.numpy as jnp
import pytest
from support.gpus import H100, on
from support.mass_base import Case, MassBase, build

from pallas_kernels.attention_mass import triton
from pallas_kernels.attention_mass.mass_problem import Counting

# JAX 0.11 announced the end of this backend.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")

pytest.importorskip("jax.experimental.pallas.triton", reason="this JAX has no Pallas Triton backend")

SMALL = triton.Config(queries=32, keys=64, split=128)


class TestTriton(MassBase):
    def log_sum_exp(self, problem):
        return triton.log_sum_exp(problem, config=SMALL, interpret=True)

    def attention_mass(self, problem, counting):
        return triton.attention_mass(problem, counting, config=SMALL, interpret=True)


@pytest.mark.parametrize(("head_dim", "dtype"), [(128, jnp.bfloat16), (80, jnp.float32)], ids=["bfloat16", "float32"])
def test_lowers_for_a_gpu(dtype, head_dim):
    problem, _ = build(Case((0, 40), queries=32, keys=2048, group=4, head_dim=head_dim, dtype=dtype))

    def both(p):
        return triton.attention_mass(p, Counting(triton.log_sum_exp(p), None, None)).new

    allowed = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    with on(*H100):  # whose sizes JAX 0.12 asks for
        exported = jax.export.export(jax.jit(both), platforms=["cuda"], disabled_checks=allowed)(problem)
    assert exported.mlir_module().count("__gpu$xla.gpu.triton") == 2


def test_gpus_before_ampere_are_refused():
    problem, counting = build(Case((0, 40), dtype=jnp.float16))
    for run in (triton.log_sum_exp, lambda p: triton.attention_mass(p, counting)):
        with on("Tesla T4", 40), pytest.raises(NotImplementedError, match=r"this GPU has 7\.5"):
            run(problem)
