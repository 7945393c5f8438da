"""Sizes of kernels: which are tried, and how the fastest are found and kept; on a CPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gpus import H100, on
from support.tuning import CHUNK, DECODE, LSE, MASS, PREFILL, problem

from pallas_kernels import tunable, tune, tuned
from pallas_kernels.attention_mass import triton as mass_triton
from pallas_kernels.bench import timing
from pallas_kernels.bench.chunk_inputs import Chunk
from pallas_kernels.bench.decode_inputs import Sizes
from pallas_kernels.prefill import triton as prefill_triton
from pallas_kernels.ragged_decode import xla
from pallas_kernels.ragged_decode.mosaic_gpu import MosaicGpuConfig
from pallas_kernels.ragged_decode.triton import TritonConfig
from pallas_kernels.tpu import tiles
from pallas_kernels.tunable import OPERATIONS, cases

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")

# --- what is measured and kept --------------------------------------------------------------------------------


def test_without_an_accelerator_there_is_nothing_to_tune(tmp_path, capsys):
    assert tune.main([str(tmp_path / "sizes.json")]) == 1
    assert capsys.readouterr().out.count(".") == 1 and not list(tmp_path.iterdir())


@pytest.fixture
def measured(monkeypatch):
    """Implementations that refuse items of 7 pages, and clocks that say fewer pages take longer."""
    ran = []

    def decode(problem, *, config):
        if config.pages == 7:
            raise NotImplementedError("7 pages do not fit")
        ran.append(config.pages)
        return xla.decode(problem)

    def clock(candidates, steps, rounds):
        return {name: timing.Timed(*[1 / ran[i]] * 3) for i, name in enumerate(candidates)}

    monkeypatch.setattr(tunable.decode, "IMPLEMENTATIONS", {"triton": decode})
    monkeypatch.setattr(tune.timing, "interleaved", clock)
    return lambda *pages: tune.measure(DECODE, problem(), "triton", [TritonConfig(n) for n in pages])


def test_the_fastest_is_kept(measured, tmp_path):
    path, outcome = tmp_path / "sizes.json", measured(1, 7, 4, 2)
    assert outcome.best == dataclasses.asdict(TritonConfig(4)) and (outcome.tried, outcome.refused) == (3, 1)
    assert (outcome.microseconds, outcome.chosen) == (0.25e6, 1e6) and "pages 4, block 64" in outcome.line()
    assert outcome.line().endswith("; 1 of 4 did not run")
    tuned.write(path, {outcome.kernel: {outcome.key: outcome.best}})
    tuned.write(path, {"another": {"cpu | D=1": {"pages": 1}}})
    assert tuned.read(path)[outcome.kernel] == {outcome.key: outcome.best} and "another" in tuned.read(path)


def test_what_never_ran_is_not_kept(measured):
    outcome = measured(7)
    assert outcome.best is None and "none of 1 sizes ran (7 pages do not fit)" in outcome.line()


@pytest.mark.parametrize("error", [TypeError("a kernel's mistake"), KeyError("another")])
def test_mistakes_are_no_refusals(error, monkeypatch):
    def decode(problem, *, config):
        raise error

    monkeypatch.setattr(tunable.decode, "IMPLEMENTATIONS", {"triton": decode})
    with pytest.raises(type(error)):
        tune.measure(DECODE, problem(), "triton", [TritonConfig(1)])


def test_what_a_compiler_of_kernels_says_is_a_refusal(monkeypatch):
    from jax._src.pallas.triton.lowering import LoweringError  # of no public type

    def decode(problem, *, config):
        raise LoweringError("not so large\nand so on")

    monkeypatch.setattr(tunable.decode, "IMPLEMENTATIONS", {"triton": decode})
    outcome = tune.measure(DECODE, problem(), "triton", [TritonConfig(1)])
    assert (outcome.refused, outcome.refusal) == (1, "not so large")


@pytest.mark.parametrize(
    ("operation", "name", "configs"),
    [
        (PREFILL, "tpu", [tiles.Config(128, 128), tiles.Config(256, 128)]),
        (LSE, "tpu", [tiles.Config(128, 128), tiles.Config(128, 256, 256)]),
        (MASS, "tpu", [tiles.Config(128, 128)]),
        (PREFILL, "triton", [prefill_triton.Config(64, 64), prefill_triton.Config(32, 128)]),
        (LSE, "triton", [mass_triton.Config(64, 64), mass_triton.Config(64, 64, 128)]),
        (MASS, "triton", [mass_triton.Config(64, 64)]),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_each_kernel_is_measured_with_the_sizes_it_is_given(operation, name, configs, monkeypatch):
    """In interpret mode, one step of each; a block that no compiler takes is counted and the others go on."""
    monkeypatch.setattr(tune, "_STEPS", 1)
    seen = []
    step = operation.step

    def watched(p, implementation, *, config, **options):
        seen.append(config)
        if len(seen) == 1:
            raise_one = RuntimeError("RESOURCE_EXHAUSTED: too large")
            return lambda *_: (_ for _ in ()).throw(raise_one)
        return step(p, implementation, config=config, **options)

    monkeypatch.setattr(operation, "step", watched)
    outcome = tune.measure(operation, operation.problem(CHUNK), name, [configs[0], *configs], 1, interpret=True)
    assert seen == [configs[0], *configs] and outcome.kernel == f"{operation.name}.{name}"
    assert (outcome.tried, outcome.refused) == (len(configs), 1) and outcome.refusal.startswith("RESOURCE_EXHAUSTED")
    assert outcome.best in [dataclasses.asdict(config) for config in configs] and outcome.microseconds > 0


@pytest.mark.parametrize("operation", [PREFILL, LSE, MASS], ids=lambda x: x.name)
def test_a_step_is_the_operation_of_its_arrays(operation):
    """What is timed depends on every array: nothing of it is left out or made once for all steps."""
    p = operation.problem(CHUNK)
    arguments = operation.arguments(p)
    step = jax.jit(operation.step(p, "xla"))
    out = step(*arguments)
    assert out.shape == p.q.shape and np.isfinite(np.asarray(out)).all()
    for i, x in enumerate(arguments):
        changed = [*arguments]
        changed[i] = x - 3 if jnp.issubdtype(x.dtype, jnp.integer) else x * 1.5
        assert np.abs(np.asarray(step(*changed)) - np.asarray(out)).max() > 1e-4


@pytest.fixture
def accelerated(monkeypatch):
    """A machine with one implementation of each operation, whose search is seen and finds sizes by the problem."""
    seen = []

    def measure(operation, problem, name, configs, rounds):
        seen.append((operation.name, problem.q.shape))
        if len(seen) == 3:
            raise KeyboardInterrupt
        key, pages = str(tuned.key_of(problem)), problem.q.shape[-1]
        return tune.Tuned(f"{operation.name}.{name}", key, {"pages": pages}, 1.0, 1.0, 1, 0)

    for operation in OPERATIONS.values():
        monkeypatch.setattr(operation, "order", {"cpu": ("triton",)})
        monkeypatch.setattr(operation, "candidates", lambda problem, name: [None] * 5)
    monkeypatch.setattr(tune, "measure", measure)
    return seen


def of_sizes(*head_dims):
    sizes = [Sizes(batch=1, heads=1, mean=16, head_dim=dim) for dim in head_dims]
    return [case for one in sizes for case in cases(["ragged_decode"], one)]


def test_what_was_found_is_kept_when_the_search_is_cut_short(accelerated, tmp_path):
    path = tmp_path / "sizes.json"
    with pytest.raises(KeyboardInterrupt):
        tune.run(path, of_sizes(16, 32, 64), say=lambda line: None)
    assert sorted(sizes["pages"] for sizes in tuned.read(path)["ragged_decode.triton"].values()) == [16, 32]
    assert [file.name for file in tmp_path.iterdir()] == ["sizes.json"]


def test_the_command_says_what_it_does_and_tunes_what_is_named(accelerated, tmp_path, capsys):
    path = tmp_path / "sizes.json"
    chosen = "--operation prefill log_sum_exp --queries 32 --tokens 64 --heads 1 --head-dim 16".split()
    assert tune.main([str(path), *chosen]) == 0
    assert accelerated == [("prefill", (1, 1, 4, 32, 16)), ("log_sum_exp", (1, 1, 4, 32, 16))]
    assert set(tuned.read(path)) == {"prefill.triton", "log_sum_exp.triton"}
    key = str(tuned.key_of(PREFILL.problem(Chunk(32, 64, 1, head_dim=16))))
    begun, ended, *others = capsys.readouterr().out.splitlines()
    assert begun == f"prefill.triton, {key}: 5 sizes" and ended.startswith(f"prefill.triton, {key}: 1.0 µs")
    assert len(others) == 2
    assert tune.main([str(path), "--operation", "decode"]) == 1
    assert "There is no operation 'decode' to tune; there are ragged_decode, prefill" in capsys.readouterr().out


def test_an_implementation_without_sizes_for_this_device_is_a_line(accelerated, tmp_path, monkeypatch):
    def refuse(problem, name):
        raise NotImplementedError("heads do not fit")

    monkeypatch.setattr(DECODE, "candidates", refuse)
    said = []
    (outcome,) = tune.run(tmp_path / "sizes.json", of_sizes(16), say=said.append)
    assert outcome.best is None and not accelerated and said[0].endswith("none of 1 sizes ran (heads do not fit)")


def test_all_operations_are_tuned_by_default():
    found = [(case.operation.name, getattr(case.sizes, "queries", 1)) for case in cases()]
    assert found.count(("ragged_decode", 1)) == 1
    for operation in (PREFILL, LSE, MASS):
        assert [n for name, n in found if name == operation.name] == [*operation.queries] * len(tunable.TOKENS)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"queries": 0}, "queries is 0; give at least 1."),
        ({"tokens": -1}, "tokens is -1; give at least 1."),
        ({"queries": 64, "tokens": 32}, "queries is 64; give at most the 32 tokens they are the last of."),
        ({"dtype": "int32"}, "dtype is 'int32'"),
    ],
)
def test_chunks_that_are_no_problem(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        Chunk(**wrong)


def test_a_prompt_is_read_in_the_models_numbers():
    assert PREFILL.problem(dataclasses.replace(CHUNK, dtype="int8")).k.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "text", ["not json", "[]", "{}", '{"kernels": []}', '{"kernels": {"a": 1}}', '{"kernels": {"a": {"b": 1}}}', "\xff"]
)
def test_a_file_that_holds_something_else_is_said_before_the_search(accelerated, tmp_path, text, capsys):
    path = tmp_path / "sizes.json"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=r"sizes.json holds no sizes of kernels: .*; tune into another file\."):
        tune.run(path, of_sizes(16))
    assert tune.main([str(path)]) == 1 and "holds no sizes of kernels" in capsys.readouterr().out
    assert not accelerated and path.read_bytes() == text.encode("latin1")


def test_a_file_that_cannot_be_written_is_said_before_the_search(accelerated, tmp_path, capsys):
    assert tune.main([str(tmp_path / "none" / "sizes.json")]) == 1
    assert "No such file or directory" in capsys.readouterr().out and not accelerated


# --- candidates -----------------------------------------------------------------------------------------------


def test_candidates_of_a_decode_step_begin_with_the_rule():
    with on(*H100):
        p = problem()
        for name, kind in (("triton", TritonConfig), ("mosaic_gpu", MosaicGpuConfig)):
            found = DECODE.candidates(p, name)
            assert found[0] == kind.of(p) and len(found) == len(set(found)) > 10
    with pytest.raises(ValueError, match="xla has no sizes"):
        DECODE.candidates(problem(), "xla")


@pytest.mark.parametrize("queries", [32, 160, 600])
@pytest.mark.parametrize("operation", [PREFILL, LSE, MASS], ids=lambda x: x.name)
def test_candidates_of_a_chunk_begin_with_the_rule(operation, queries):
    p = operation.problem(dataclasses.replace(CHUNK, queries=queries, tokens=2048, head_dim=128, dtype="bfloat16"))
    found = operation.candidates(p, "triton")
    rule = (prefill_triton if operation is PREFILL else mass_triton).Config.default(p)
    split = {} if operation is PREFILL else {"split": rule.split if operation is LSE else None}
    assert found[0] == dataclasses.replace(rule, **split) and len(found) == len(set(found)) > 10
    found = operation.candidates(p, "tpu")
    assert found[0] == tiles.Config.default(2, queries, 2048, jnp.bfloat16)
    # A window has one block whatever is asked for; no block is larger than the least chunk of the class.
    assert {min(x.queries, queries) for x in found} == {32: {32}, 160: {128, 160}, 600: {128, 256, 512}}[queries]
    assert {x.keys for x in found} == {128, 256, 512, 1024, 2048}
    assert len(found) == len(set(found)) >= 5


def test_sizes_that_come_to_the_same_blocks_are_tried_once():
    p = MASS.problem(dataclasses.replace(CHUNK, queries=32, tokens=256))
    assert len(MASS.candidates(p, "tpu")) == 2  # of 128 and of 256 keys: queries and parts are as many as there are
