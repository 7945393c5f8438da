"""The Mosaic GPU kernel in JAX's interpreter of Hopper's copies and barriers, and lowered for CUDA.

The interpreter runs each thread block by itself, so there are few and small cases here; ``test_on_hardware.py`` runs
them all on a GPU.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support.decode_base import Case, DecodeBase, build, by_row, rows_of
from support.gpus import A100, H100, lowered, on

from pallas_kernels.ragged_decode import mosaic_gpu, ragged_decode
from pallas_kernels.ragged_decode.mosaic_gpu import MosaicGpuConfig

plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="this jaxlib has no Mosaic GPU")

# 64 slots a page; 256 an item: lengths before, at and after both, none, and a head of two items.
CASE = Case(((300, 0), (64, 65)), (5, 3), group=3, page_size=64, dtype=jnp.bfloat16)

# Heads of less than an item, of one and of two; both rows' last items are of no head.
BY_ROW = by_row(((300, 0, 64), (1, 64, 380)), ((5, 2, 1), (1, 1, 6)), group=3, page_size=64, dtype=jnp.bfloat16)


def interpreter():
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return interpret_pallas_call


def parameters(**options):
    interpreter = mosaic_gpu._interpreter(True)
    return dataclasses.replace(interpreter, **options)


class Interpreted(DecodeBase):
    layouts = ("stacked",)
    interpret = True

    def run(self, problem):
        with on(*H100):
            return mosaic_gpu.decode(problem, config=MosaicGpuConfig(pages=4, stages=2), interpret=self.interpret)


@pytest.mark.parametrize(
    "change",
    [
        {"log_mass": True, "window": 100, "soft_cap": 3.0, "dtype": jnp.float16, "head_dim": 80, "group": 9},
        {"log_mass": True, "with_logits": True, "logits_scale": 0.3, "head_dim": 64},
    ],
    ids=["window, float16", "logits"],
)
def test_against_the_reference(change):
    checks = Interpreted()
    checks.tolerance = {**checks.tolerance, "float16": 2e-3}
    checks.check(dataclasses.replace(CASE, **change))


@pytest.mark.slow
@pytest.mark.parametrize(("group", "log_mass"), [(1, False), (2, True), (8, False), (16, True)])
def test_lengths_around_every_boundary(group, log_mass):
    """Of a page and of an item, past which keys are NaN."""
    lengths = ((0, 1, 63, 64, 65, 255, 256, 257, 300),)
    case = Case(lengths, (1, 1, 1, 1, 2, 4, 4, 5, 5), group=group, log_mass=log_mass, head_dim=64, page_size=64)
    Interpreted().check(dataclasses.replace(case, dtype=jnp.bfloat16))


@pytest.mark.slow
def test_runs_by_row():
    case = dataclasses.replace(BY_ROW, head_dim=64, log_mass=True)
    Interpreted().check(dataclasses.replace(case, with_logits=True))
    Interpreted().check(dataclasses.replace(case, window=100, soft_cap=3.0))


@pytest.mark.parametrize("case", [CASE, BY_ROW], ids=["ragged", "by row"])
def test_no_copy_races_with_a_read(case):
    checks = Interpreted()
    checks.interpret = parameters(detect_races=True)
    checks.check(case)
    assert not interpreter().get_races().races_found


def test_a_copy_that_is_not_waited_for_is_found(monkeypatch):
    """The interpreter sees this kernel's copies: without the wait for values it says so, or the result is wrong."""
    waits = iter(range(1000))
    wait = mosaic_gpu.plgpu.barrier_wait
    # Waits are traced in the order q, keys, values.
    monkeypatch.setattr(mosaic_gpu.plgpu, "barrier_wait", lambda bar: None if next(waits) == 2 else wait(bar))
    checks = Interpreted()
    checks.interpret = parameters(detect_races=True)
    try:
        with pytest.raises(
            Exception,
            match=r"RACE DETECTED|completed again before previous completion was observed|no threads observed phase",
        ):
            checks.check(CASE)
    finally:
        interpreter().reset_gpu_interpret_mode_state()


def arrays(problem):
    return {"q": problem.q, "pages": problem.pages, "length": problem.length, "starts": problem.starts}


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_lowers_for_cuda(head_dim):
    if head_dim > mosaic_gpu.WIDEST:
        pytest.skip(f"JAX {jax.__version__} finds no layout of so wide a result; Triton takes it")
    options = {"log_mass": True, "soft_cap": 3.0, "with_logits": True, "window": 9} if head_dim == 96 else {}
    problem = build(dataclasses.replace(CASE, head_dim=head_dim, **options), "padded" if head_dim == 80 else "stacked")
    with jax.enable_x64(head_dim == 96):
        module = lowered(lambda given: mosaic_gpu.decode(dataclasses.replace(problem, **given)), arrays(problem))
    assert "mosaic_gpu" in module


@pytest.mark.parametrize("x64", [False, True])
def test_runs_by_row_lower_for_cuda(x64):
    problem = build(BY_ROW, "stacked")
    with jax.enable_x64(x64):
        module = lowered(lambda given: mosaic_gpu.decode(dataclasses.replace(problem, **given)), arrays(problem))
    assert "mosaic_gpu" in module


@pytest.mark.parametrize(
    ("change", "layout", "device", "sentence"),
    [
        ({}, "stacked", A100, "this GPU has 8.0"),
        ({}, "stacked", ("NVIDIA B200", 148), "this GPU has 10.0"),
        ({}, "columns", H100, "pages of keys, then values"),
        ({"head_dim": 64}, "lanes", H100, "pages of keys, then values"),
        ({"dtype": jnp.float32}, "stacked", H100, "16-bit rows"),
        ({"dtype": jnp.int8}, "stacked", H100, "16-bit rows"),
        ({"page_size": 16}, "stacked", H100, "pages of 64 slots, not 16"),
        ({"head_dim": 72}, "stacked", H100, "not 72"),
        ({"head_dim": 512}, "stacked", H100, "not 512"),
        ({"group": 65}, "stacked", H100, "65 queries"),
        ({"alibi": True}, "stacked", H100, "neither scales of values nor positions"),
    ],
)
def test_what_does_not_fit_is_refused(change, layout, device, sentence):
    problem = build(dataclasses.replace(CASE, **change), layout)
    with on(*device), pytest.raises(NotImplementedError, match=sentence):
        jax.eval_shape(lambda: mosaic_gpu.decode(problem))


def test_queries_of_some_rows_are_refused():
    problem = build(dataclasses.replace(CASE, lengths=((5, 9), (3, 1)), runs=(1, 1)), "stacked")
    with on(*H100), pytest.raises(NotImplementedError, match="queries of all rows"):
        mosaic_gpu.decode(rows_of(problem, 1, 1))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(
    ("change", "device", "call"),
    [
        ({}, H100, "mosaic_gpu"),
        ({"alibi": True}, H100, "xla.gpu.triton"),
        ({}, A100, "xla.gpu.triton"),
        ({}, ("Tesla V100-SXM2-16GB", 80), None),
    ],
    ids=["hopper", "alibi", "ampere", "volta"],
)
def test_each_gpu_gets_the_first_that_fits(change, device, call):
    problem = build(dataclasses.replace(CASE, **change), "stacked")
    values = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    values.pop("first_visible")  # the XLA form's own
    three = [values.pop(name) for name in ("q", "pages", "length")]
    module = lowered(lambda *three: ragged_decode(*three, **values), *three, device=device)
    calls = [name for name in ("mosaic_gpu", "xla.gpu.triton") if name in module]
    assert calls == ([] if call is None else [call])
