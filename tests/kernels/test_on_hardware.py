"""Every GPU implementation against the reference on a GPU; skipped where there is none."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from support.decode_base import Case, DecodeBase, around_boundaries
from support.mass_base import Case as Window
from support.mass_base import MassBase
from support.matmul_base import Case as Product
from support.matmul_base import MatmulBase
from support.prefill_base import Case as Chunk
from support.prefill_base import PrefillBase

from pallas_kernels import tune
from pallas_kernels.attention_mass import triton as mass_triton
from pallas_kernels.attention_mass import xla as mass_xla
from pallas_kernels.bench import decode as bench
from pallas_kernels.bench.decode_inputs import Sizes
from pallas_kernels.gpu import chip
from pallas_kernels.prefill import triton as prefill_triton
from pallas_kernels.prefill import xla as prefill_xla
from pallas_kernels.quantised_matmul import triton as matmul_triton
from pallas_kernels.quantised_matmul import xla as matmul_xla
from pallas_kernels.ragged_decode import mosaic_gpu, triton, xla
from pallas_kernels.tunable import OPERATIONS, cases

pytestmark = [
    pytest.mark.hardware,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU here"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]


#: Of the kernels over dense keys: products of float32 rows are exact to a few roundings.
ATTENTION = {"float32": 1e-4, "bfloat16": 2e-2}


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


class TestXla(OnGpu):
    layouts = ("stacked", "padded", "lanes")
    module = xla


class _Compiled:
    """Runs a function in a program of its own, with float32's products; a refusal skips the test."""

    @staticmethod
    def compiled(function, *arguments):
        with jax.default_matmul_precision("highest"):
            try:
                return jax.jit(function)(*arguments)
            except NotImplementedError as refusal:
                pytest.skip(str(refusal))


class TestPrefillTriton(PrefillBase, _Compiled):
    tolerance: ClassVar = ATTENTION
    module = prefill_triton

    def run(self, problem):
        return self.compiled(self.module.prefill, problem)

    def test_many_blocks(self):
        """Prompts of thousands of tokens, with the sizes that the kernel itself chooses."""
        self.check(Chunk((0, 2048, 7000), queries=1024, keys=8192, head_dim=128, group=4, dtype=jnp.bfloat16))


class TestPrefillXla(TestPrefillTriton):
    module = prefill_xla


class TestMassTriton(MassBase, _Compiled):
    tolerance: ClassVar = ATTENTION
    module = mass_triton

    def log_sum_exp(self, problem):
        return self.compiled(self.module.log_sum_exp, problem)

    def attention_mass(self, problem, counting):
        return self.compiled(self.module.attention_mass, problem, counting)

    def test_many_blocks(self):
        self.check(Window((3000, 7000), queries=64, keys=8192, group=4, head_dim=128, dtype=jnp.bfloat16))


class TestMassXla(TestMassTriton):
    module = mass_xla


class TestMatmulTriton(MatmulBase, _Compiled):
    tolerance: ClassVar = {"float32": 1e-4, "bfloat16": 1e-3}
    module = matmul_triton

    def run(self, problem):
        return self.compiled(self.module.quantised_matmul, problem)

    def test_eight_bits(self):
        self.check(Product(bits=8, group=32, minimum=True))
        self.check(Product(bits=8, dtype=jnp.bfloat16))

    def test_a_models_matrix(self):
        self.check(Product(rows=16, inputs=4096, outputs=14336, group=128, dtype=jnp.bfloat16))


class TestMatmulXla(TestMatmulTriton):
    tolerance: ClassVar = {"float32": 1e-4, "bfloat16": 2e-2}  # weights rounded to 16 bits
    module = matmul_xla


@pytest.mark.skipif(chip.target().capability is None, reason="there is no NVIDIA GPU here")
def test_the_benchmark_and_the_tuning_run(tmp_path):
    sizes = Sizes(batch=2, heads=4, mean=1024)
    report = bench.run(sizes, rounds=2, copy_bytes=64 << 20)
    ran = [row for row in report.rows if row.refused is None]
    assert {"triton", "xla"} <= {row.name for row in ran}
    assert all(row.error is not None and row.error < 2e-2 for row in ran)
    found = tune.run(tmp_path / "sizes.json", cases(sizes=sizes, queries=(64,), tokens=(1024,)), rounds=2)
    assert {x.kernel for x in found if x.best is not None} >= {f"{name}.triton" for name in OPERATIONS}
