"""Sizes of kernels that were tuned: kernels use them for the problems of their class, and no others; on a CPU."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from support.gpus import A100, H100, on
from support.tuning import CHUNK, LSE, MASS, PREFILL, problem

from pallas_kernels import tunable, tuned
from pallas_kernels.attention_mass import tpu as mass_tpu
from pallas_kernels.attention_mass import triton as mass_triton
from pallas_kernels.attention_mass import xla as mass_xla
from pallas_kernels.prefill import tpu as prefill_tpu
from pallas_kernels.prefill import triton as prefill_triton
from pallas_kernels.prefill import xla as prefill_xla
from pallas_kernels.ragged_decode import mosaic_gpu, triton
from pallas_kernels.ragged_decode.mosaic_gpu import MosaicGpuConfig
from pallas_kernels.tpu import tiles

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")


def test_sizes_are_given_then_tuned_then_by_rule(tmp_path, monkeypatch):
    path, p = tmp_path / "sizes.json", problem()
    with on(*H100):
        key = str(tuned.Key.of(p))
    assert key == "NVIDIA H100 80GB HBM3 | D=16 G=4 bfloat16 R=64"
    tuned.write(path, {"ragged_decode.mosaic_gpu": {key: {"pages": 3, "stages": 5}}})

    def chosen():
        with on(*H100):
            return tuned.config("ragged_decode.mosaic_gpu", p, MosaicGpuConfig)

    assert chosen() is None
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    assert chosen() == MosaicGpuConfig(3, 5)
    tuned.write(path, {"ragged_decode.mosaic_gpu": {key: {"pages": 3, "depth": 5}}})
    with pytest.raises(ValueError, match="tune again"):
        chosen()
    tuned.write(path, {"ragged_decode.mosaic_gpu": {key: {"pages": 0}}})
    with pytest.raises(ValueError, match=r"sizes.json: sizes of ragged_decode.mosaic_gpu are .*; tune again"):
        chosen()
    tuned.write(path, {"ragged_decode.mosaic_gpu": {key: {"pages": 3, "stages": 5}}})
    with on(*A100):
        assert tuned.config("ragged_decode.mosaic_gpu", p, MosaicGpuConfig) is None
    other = tmp_path / "other.json"
    other.write_text("not json")
    monkeypatch.setenv(tuned.VARIABLE, str(other))
    with pytest.raises(ValueError, match="holds no sizes"):
        chosen()


@pytest.mark.parametrize("module", [triton, mosaic_gpu], ids=["triton", "mosaic_gpu"])
def test_kernels_ask_for_tuned_sizes(module, monkeypatch):
    asked = []

    def answer(kernel, problem, kind):
        asked.append(kernel)
        raise NotImplementedError("asked")

    monkeypatch.setattr(tuned, "config", answer)
    with pytest.raises(NotImplementedError, match="asked"):
        module.decode(problem())
    with on(*H100):
        jax.eval_shape(lambda: module.decode(problem(), config=module.__dict__[_CONFIG[module.__name__]](pages=2)))
    assert asked == ["ragged_decode." + module.__name__.rsplit(".", 1)[1]]


_CONFIG = {triton.__name__: "TritonConfig", mosaic_gpu.__name__: "MosaicGpuConfig"}


def test_a_chunks_key_holds_what_rules_look_at():
    p = PREFILL.problem(dataclasses.replace(CHUNK, queries=1024, tokens=8192, head_dim=128, dtype="bfloat16"))
    with on(*H100):
        assert str(tuned.key_of(p)) == "NVIDIA H100 80GB HBM3 | D=128 G=2 bfloat16 N>=512 T>=8192"
        q, k = p.q[:, :, :, :40], p.k[:, :, :4096]
        window = dataclasses.replace(p, q=q, k=k)
        assert str(tuned.key_of(window)) == "NVIDIA H100 80GB HBM3 | D=128 G=2 bfloat16 N=64 T<8192"


def test_classes_of_queries():
    classes = {n: tuned.query_class(n) for n in (1, 16, 17, 32, 33, 64, 65, 127, 128, 255, 256, 511, 512, 4096)}
    assert list(classes.values()) == [16, 16, 32, 32, 64, 64, 128, 128, 128, 128, 256, 256, 512, 512]


def _blocks(function, *arguments):
    """Grids and, where there are any, shapes of blocks of the kernels that are traced."""
    found = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                mapping = equation.params["grid_mapping"]
                blocks = [tuple(map(str, x.block_shape)) for x in mapping.block_mappings]
                found.append((str(mapping.grid), blocks))
            for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns") and equation.primitive.name != "pallas_call":
                    visit(getattr(inner, "jaxpr", inner))

    visit(jax.make_jaxpr(function)(*arguments).jaxpr)
    assert found
    return found


@dataclasses.dataclass(frozen=True)
class Asking:
    """A kernel that asks: run(problem, **options) traces it, ``exact`` computes the same in XLA."""

    kernel: str
    operation: object
    run: object
    exact: object
    best: object  # sizes that are not the rule's
    other: object  # sizes that are neither

    def __str__(self):
        return self.kernel


def _counting(p):
    return mass_xla.log_sum_exp(p)


def _mass(module):
    return lambda p, **options: module.attention_mass(p, tunable.Counting(_counting(p), None, None), **options).new


ASKING = [
    Asking(
        "prefill.tpu", PREFILL, lambda p, **o: prefill_tpu.prefill(p, **o).out, lambda p: prefill_xla.prefill(p).out,
        tiles.Config(128, 128, 128), tiles.Config(128, 256, 256),
    ),
    Asking(
        "log_sum_exp.tpu", LSE, mass_tpu.log_sum_exp, mass_xla.log_sum_exp,
        tiles.Config(128, 128, 128), tiles.Config(128, 256, 256),
    ),
    Asking(
        "attention_mass.tpu", MASS, _mass(mass_tpu), _mass(mass_xla),
        tiles.Config(128, 128, 128), tiles.Config(128, 256, 256),
    ),
    Asking(
        "prefill.triton", PREFILL, lambda p, **o: prefill_triton.prefill(p, **o).out,
        lambda p: prefill_xla.prefill(p).out, prefill_triton.Config(64, 64), prefill_triton.Config(128, 32),
    ),
    Asking(
        "log_sum_exp.triton", LSE, mass_triton.log_sum_exp, mass_xla.log_sum_exp,
        mass_triton.Config(64, 64, 128), mass_triton.Config(64, 64, 192),
    ),
    Asking(
        "attention_mass.triton", MASS, _mass(mass_triton), _mass(mass_xla),
        mass_triton.Config(64, 32), mass_triton.Config(64, 16),
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("asking", ASKING, ids=str)
def test_a_chunks_kernel_uses_what_was_measured(asking, tmp_path, monkeypatch):
    p = asking.operation.problem(dataclasses.replace(CHUNK, queries=128))
    path = tmp_path / "sizes.json"

    def blocks(p=p, **options):
        return _blocks(lambda p: asking.run(p, interpret=True, **options), p)

    by_rule, given, other = blocks(), blocks(config=asking.best), blocks(config=asking.other)
    assert by_rule != given != other != by_rule
    tuned.write(path, {asking.kernel: {str(tuned.key_of(p)): dataclasses.asdict(asking.best)}})
    assert blocks() == by_rule
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    assert blocks() == given
    assert blocks(config=asking.other) == other
    np.testing.assert_allclose(asking.run(p, interpret=True), asking.exact(p), atol=3e-5, rtol=3e-5)

    def of(**changes):
        return asking.operation.problem(dataclasses.replace(CHUNK, **changes))

    # Other head sizes, groups, types and classes go by the rule; those of the class by what was measured.
    others = [of(head_dim=128), of(group=1), of(queries=64), of(queries=256), of(tokens=8192), of(dtype="bfloat16")]
    same = of(queries=200, tokens=1024)
    ruled, like = [blocks(x) for x in others], blocks(same)
    assert like == blocks(same, config=asking.best)
    monkeypatch.delenv(tuned.VARIABLE)
    assert [blocks(x) for x in others] == ruled and blocks(same) != like


@pytest.mark.parametrize("asking", ASKING, ids=str)
def test_sizes_larger_than_a_problem_of_their_class_are_cut(asking, tmp_path, monkeypatch):
    """As the kernel's own are: 17 queries and 100 keys in blocks that were measured for 32 of many."""
    p = asking.operation.problem(dataclasses.replace(CHUNK, queries=17, tokens=100))
    wide = {"queries": 512, "keys": 4096} if ".tpu" in asking.kernel else {"queries": 64, "keys": 256}
    path = tmp_path / "sizes.json"
    tuned.write(path, {asking.kernel: {str(tuned.key_of(p)): dataclasses.asdict(type(asking.best)(**wide))}})
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    np.testing.assert_allclose(asking.run(p, interpret=True), asking.exact(p), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("asking", ASKING, ids=str)
@pytest.mark.parametrize("wrong", [{"keys": 100}, {"queries": "many"}, {"rows": 128}], ids=lambda x: next(iter(x)))
def test_sizes_of_another_kind_are_said(asking, wrong, tmp_path, monkeypatch):
    p, path = asking.operation.problem(CHUNK), tmp_path / "sizes.json"
    sizes = dict(sorted((dataclasses.asdict(asking.best) | wrong).items()))
    tuned.write(path, {asking.kernel: {str(tuned.key_of(p)): sizes}})
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    sentence = re.escape(f"{path}: sizes of {asking.kernel} are {sizes}; tune again with this version.")
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(lambda: asking.run(p, interpret=True))
    path.write_text(json.dumps({"kernels": {asking.kernel: 3}}))
    with pytest.raises(ValueError, match="holds no sizes of kernels"):
        jax.eval_shape(lambda: asking.run(p, interpret=True))
    # Sizes that are given are taken without a look at the file.
    jax.eval_shape(lambda: asking.run(p, config=asking.best, interpret=True))


def test_queries_that_are_no_whole_blocks_go_by_their_own_class(tmp_path, monkeypatch):
    """The masses' TPU kernels take them in a call of their own."""
    p = LSE.problem(dataclasses.replace(CHUNK, queries=300, tokens=2048, group=4))
    rest = dataclasses.replace(p, q=p.q[:, :, :, :44])
    path = tmp_path / "sizes.json"
    sizes = {str(tuned.key_of(x)): {"queries": 128, "keys": keys} for x, keys in ((p, 512), (rest, 256))}
    tuned.write(path, {"log_sum_exp.tpu": sizes})
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    (_, first), (_, second) = _blocks(lambda p: mass_tpu.log_sum_exp(p, interpret=True), p)
    assert "512" in str(first[1]) and "256" in str(second[1])
