"""The GPU kernel of prefill: results in interpret mode, and that it lowers for a GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest
from support.gpus import H100, on
from support.prefill_base import Case, PrefillBase, build

from pallas_kernels.prefill import prefill, triton

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


@pytest.mark.parametrize("kind", [("Tesla T4", 40), ("Tesla V100-SXM2-16GB", 80)], ids=["T4", "V100"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_gpus_before_ampere_run_the_xla_form(kind, dtype):
    problem = build(Case((0, 90), dtype=dtype))
    with on(*kind), pytest.raises(NotImplementedError, match=r"this GPU has 7\.[05]"):
        triton.prefill(problem)
    given = {"offset": problem.offset, "scale": problem.scale, "length": problem.length, "kept": problem.kept}
    with on(*kind):
        module = jax.jit(lambda q, k, v: prefill(q, k, v, **given)).trace(problem.q, problem.k, problem.v)
        assert "triton" not in module.lower(lowering_platforms=("cuda",)).as_text()
