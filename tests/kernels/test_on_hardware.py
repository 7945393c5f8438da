"""Every GPU implementation against the reference on a GPU; skipped where there is none."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from support.decode_base import Case, DecodeBase, around_boundaries

from pallas_kernels import tune
from pallas_kernels.bench import decode as bench
from pallas_kernels.bench.decode_inputs import Sizes
from pallas_kernels.gpu import chip
from pallas_kernels.ragged_decode import mosaic_gpu, triton
from pallas_kernels.tunable import OPERATIONS, cases

pytestmark = [
    pytest.mark.hardware,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU here"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]


class OnGpu(DecodeBase):
    """A problem that an implementation says it cannot do is skipped with its sentence."""

    # Products of float32 rows are exact to a few roundings; 16-bit weights and rows to theirs.
    tolerance: ClassVar = {**DecodeBase.tolerance, "float32": 1e-4, "float16": 4e-3, "float8_e5m2": 2e-2}
    module = triton

    def run(self, problem):
        arrays = {"q": problem.q, "pages": problem.pages, "length": problem.length, "starts": problem.starts}
        decode = jax.jit(lambda given: self.module.decode(dataclasses.replace(problem, **given)))
        try:
            return decode(arrays)
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))

    def test_many_items(self):
        lengths = tuple(tuple(int(700 * (1 + b) * (1 + 3 * h) % 9000) for h in range(4)) for b in range(8))
        self.check(Case(lengths, (150,) * 4, page_size=64, dtype=jnp.bfloat16, log_mass=True))
        self.check(Case(lengths, (150, 141, 145, 149), page_size=64, dtype=jnp.float16, window=1000))


class TestTriton(OnGpu):
    layouts = ("stacked", "padded", "lanes")

    @pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
    def test_float8_rows(self, dtype):
        self.check(Case(((70, 130), (5, 160)), (10, 11), dtype=dtype))


class TestMosaicGpu(OnGpu):
    layouts = ("stacked", "padded")
    module = mosaic_gpu

    def check(self, case, seed=0):
        if case.dtype == jnp.int8:
            pytest.skip("the Mosaic GPU kernel multiplies 16-bit rows")
        dtype = jnp.float16 if case.dtype == jnp.float16 else jnp.bfloat16
        super().check(dataclasses.replace(case, page_size=64, dtype=dtype), seed)

    def test_lengths_around_its_own_boundaries(self):
        four = tuple(tuple(4 * n for n in row) for row in around_boundaries())
        self.check(Case(tuple(tuple(n + d for n in row) for row in four for d in (0, 1)), (11, 11), log_mass=True))


@pytest.mark.skipif(chip.target().capability is None, reason="there is no NVIDIA GPU here")
def test_the_benchmark_and_the_tuning_run(tmp_path):
    sizes = Sizes(batch=2, heads=4, mean=1024)
    report = bench.run(sizes, rounds=2, copy_bytes=64 << 20)
    ran = [row for row in report.rows if row.refused is None]
    assert {"triton", "xla"} <= {row.name for row in ran}
    assert all(row.error is not None and row.error < 2e-2 for row in ran)
    found = tune.run(tmp_path / "sizes.json", cases(sizes=sizes, queries=(64,), tokens=(1024,)), rounds=2)
    assert {x.kernel for x in found if x.best is not None} >= {f"{name}.triton" for name in OPERATIONS}
