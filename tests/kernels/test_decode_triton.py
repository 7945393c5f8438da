"""The Triton kernel, interpreted, and lowered for CUDA; ``test_on_hardware.py`` runs it on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support.decode_base import RAGGED, Case, DecodeBase, build, by_row, rows_of
from support.gpus import A100, H100, lowered, on

from pallas_kernels.pages import Stacked
from pallas_kernels.ragged_decode import triton
from pallas_kernels.ragged_decode.triton import TritonConfig

# JAX 0.11 announced the end of this backend.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")

pytest.importorskip("jax.experimental.pallas.triton", reason="this JAX has no Pallas Triton backend")


def arrays(problem):
    return {"q": problem.q, "pages": problem.pages, "length": problem.length, "starts": problem.starts}


class TestTriton(DecodeBase):
    layouts = ("stacked", "padded", "lanes")
    narrow = ("lanes",)

    def run(self, problem):
        def decode(given):
            return triton.decode(dataclasses.replace(problem, **given), config=self.config, interpret=True)

        # Compiled quickly, since each program runs once.
        quickly = {"xla_backend_optimization_level": 0}
        return jax.jit(decode, compiler_options=quickly)(arrays(problem))

    config = TritonConfig(pages=4, block=32)

    def layouts_of(self, case):
        """Each layout where it differs from the first; they share all but where rows are."""
        if case.page_size == 32 and case.dtype == jnp.float32 and case.head_dim in (64, 80):
            return ("stacked", "lanes" if case.head_dim == 64 else "padded")
        return ("stacked",)

    # Fewer than of other implementations: a head size or a group differs by a mask alone, and each costs a second.
    @pytest.mark.parametrize("group", [1, 3, 17])
    def test_group_sizes(self, group):
        super().test_group_sizes(group)

    @pytest.mark.parametrize(
        ("head_dim", "dtype"),
        [(64, "float32"), (80, "float32"), (128, "bfloat16"), (96, "int8"), (256, "int8"), (64, "float8_e4m3fn")],
    )
    def test_head_sizes_and_dtypes(self, head_dim, dtype):
        super().test_head_sizes_and_dtypes(head_dim, jnp.dtype(dtype))

    def test_sizes_that_are_chosen(self):
        self.config = None
        self.check(Case(((300, 17), (64, 0)), (19, 4), group=3))

    @pytest.mark.slow
    def test_blocks_within_a_page_and_over_many(self):
        self.config = TritonConfig(pages=2, block=16)
        self.check(Case(((130, 17), (64, 0)), (5, 2), page_size=32))
        self.config = TritonConfig(pages=16, block=128)
        self.check(Case(((130, 17), (64, 0)), (33, 9), page_size=4, window=70))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8])
def test_lowers_for_cuda(dtype):
    layout, x64 = ("lanes", False) if dtype == jnp.int8 else ("stacked", dtype == jnp.bfloat16)
    case = Case(((70, 130), (5, 160)), RAGGED, head_dim=64, dtype=dtype, log_mass=True, soft_cap=3.0, with_logits=True)
    problem = build(dataclasses.replace(case, alibi=True, window=9) if x64 else case, layout)
    with jax.enable_x64(x64):
        module = lowered(lambda given: triton.decode(dataclasses.replace(problem, **given)), arrays(problem))
    assert "xla.gpu.triton" in module


@pytest.mark.parametrize("x64", [False, True])
def test_runs_by_row_lower_for_cuda(x64):
    case = by_row(((70, 130), (5, 160)), ((5, 16), (11, 10)), head_dim=64, dtype=jnp.bfloat16, with_logits=True)
    problem = build(dataclasses.replace(case, window=9), "stacked")
    with jax.enable_x64(x64):
        module = lowered(lambda given: triton.decode(dataclasses.replace(problem, **given)), arrays(problem))
    assert "xla.gpu.triton" in module


@pytest.mark.parametrize(
    ("case", "layout", "device", "sentence"),
    [
        (Case(((5, 9),), (1, 1)), "columns", H100, "pages of rows"),
        (Case(((5, 9),), (1, 1), page_size=24), "stacked", H100, "power of two, not 24"),
        (Case(((5, 9),), (1, 1), group=130), "stacked", H100, "130 queries a head"),
        (Case(((5, 9),), (1, 1)), "stacked", ("Tesla V100-SXM2-16GB", 80), "this GPU has 7.0"),
        (Case(((5, 9),), (1, 1), dtype=jnp.float8_e4m3fn), "stacked", A100, "float8_e4m3fn rows"),
    ],
)
def test_what_does_not_fit_is_refused(case, layout, device, sentence):
    problem = build(case, layout)
    with on(*device), pytest.raises(NotImplementedError, match=sentence):
        jax.eval_shape(lambda: triton.decode(problem))


def test_queries_of_some_rows_are_refused():
    with on(*H100), pytest.raises(NotImplementedError, match="queries of all rows"):
        triton.decode(rows_of(build(Case(((5, 9), (3, 1)), (1, 1)), "stacked"), 1, 1))


def test_pools_whose_indices_would_overflow_are_refused():
    problem = build(Case(((5, 9),), (1, 1), dtype=jnp.int8), "stacked")
    huge = Stacked(jax.ShapeDtypeStruct((64, 2048, 2, 64, 128), jnp.int8), 128)
    with pytest.raises(NotImplementedError, match="between 2 and 4 GiB"):
        triton.decode(dataclasses.replace(problem, pages=huge))


def test_a_jax_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(triton, "plt", None)
    with pytest.raises(NotImplementedError, match="no Pallas Triton backend"):
        triton.decode(build(Case(((5, 9),), (1, 1)), "stacked"))


def test_stages_fit_the_shared_memory_of_the_gpu():
    problem = build(Case(((5, 9),), (1, 1), dtype=jnp.bfloat16, page_size=64), "stacked")
    with on(*H100):
        assert TritonConfig.of(problem) == TritonConfig(pages=2, block=64, warps=4, stages=3)
    with on("NVIDIA L4", 58):
        assert TritonConfig.of(problem).stages == 2
        # Two stages of float32 heads of 256 are 64 KB in blocks of 16, and 128 in blocks of 32.
        assert TritonConfig.of(build(Case(((5,),), (1,), head_dim=256, page_size=64), "stacked")).block == 16
        with pytest.raises(NotImplementedError, match="8192 bytes do not fit"):
            TritonConfig.of(build(Case(((5,),), (1,), head_dim=2048), "stacked"))
