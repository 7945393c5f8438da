"""The kernels' benchmark and tuning, on a CPU: what they measure, say and keep."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decode_base import Case, build

import pallas_kernels
from pallas_kernels.bench import bare, decode_inputs, timing
from pallas_kernels.bench.decode import _cudnn, _padded
from pallas_kernels.bench.decode_inputs import Sizes
from pallas_kernels.bench.kernel_report import Report, Row
from pallas_kernels.ragged_decode import reference

SMALL = ["--batch", "2", "--heads", "2", "--mean", "40", "--head-dim", "16", "--rounds", "2"]


@pytest.mark.slow
def test_the_command_measures_and_writes_on_a_bare_machine(tmp_path):
    """Where jaxtyping cannot be imported, nor kvjax; every GPU kernel's module is imported there as well."""
    command = [*SMALL, "--json", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "a.md")]
    program = (
        "import sys\n"
        "sys.modules |= {'jaxtyping': None, 'kvjax': None}\n"
        "from pallas_kernels import tune\n"
        "assert tune.main(['sizes.json']) == 1\n"
        "from pallas_kernels.bench import __main__\n"
        "from pallas_kernels.ragged_decode import mosaic_gpu, triton\n"
        f"sys.exit(__main__.main({command!r}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(pallas_kernels.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (report,) = json.loads((tmp_path / "a.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["xla"]
    (row,) = report["rows"]
    assert row["error"] < 2e-2 and 0 < row["least"] <= row["microseconds"] <= row["most"]
    assert row["gigabytes"] == pytest.approx(Sizes(2, 2, mean=40, head_dim=16).live_bytes / row["microseconds"] / 1e3)
    assert row["bandwidth_fraction"] == pytest.approx(1e9 * row["gigabytes"] / report["bandwidth"])
    text = (tmp_path / "a.md").read_text()
    assert text in done.stdout and "| xla |" in text and f"jax {jax.__version__}" in text


def test_a_refusal_is_a_line_of_the_table():
    report = Report.of(Sizes(), (Row("triton", refused="needs another GPU"), Row("xla", 1e-3, 1, 1, 1, 2, 0.5)), 1e9)
    assert "| triton | needs another GPU |" in report.markdown() and "| 50% |" in report.markdown()


def test_heads_have_the_mean_length_and_differ():
    sizes = Sizes(mean=4096, heads=64)
    slots = sizes.capacities()
    assert slots.mean() == pytest.approx(4096, rel=1e-3)
    assert 0.6 < np.log(slots).std() < 1.0
    assert (Sizes(sigma=0.0).capacities() == 2048).all()
    lengths = sizes.lengths()
    assert (lengths <= slots).all() and (lengths >= 0.9 * slots - 1).all() and lengths.min() >= 1


@pytest.mark.parametrize(
    ("dtype", "platform", "head_dim", "layout"),
    [
        ("float32", "cpu", 16, "Columns"),
        ("int8", "gpu", 16, "Stacked"),
        ("bfloat16", "tpu", 64, "Lanes"),
        ("bfloat16", "tpu", 80, "Stacked"),
    ],
)
def test_problems_are_laid_out_for_the_platform(dtype, platform, head_dim, layout, monkeypatch):
    monkeypatch.setattr(decode_inputs.dispatch, "platform", lambda: platform)
    sizes = Sizes(batch=1, heads=2, mean=40, head_dim=head_dim, dtype=dtype)
    arrays = jax.eval_shape(lambda: _arrays(decode_inputs.make(sizes)))
    pages = arrays["pages"]
    assert type(pages).__name__ == layout and pages.dtype == jnp.dtype(dtype)
    assert sizes.page == {"gpu": 64, "tpu": 16, "cpu": 16}[platform]
    assert pages.shape == (1, sum(sizes.runs), sizes.page, head_dim)
    assert ("v_scale" in arrays) == (dtype == "int8")
    assert (sizes.lengths() <= np.array(sizes.runs) * sizes.page).all()


def _arrays(p):
    values = {name: getattr(p, name) for name in ("q", "pages", "length", "k_scale", "v_scale")}
    return {name: x for name, x in values.items() if x is not None}


def test_heads_padded_to_the_longest_are_the_same_problem(monkeypatch):
    p = build(Case(((70, 30), (5, 160)), (5, 10), head_dim=16), "stacked")
    k, v = _padded(p)
    assert k.shape == v.shape == (4, 160, 1, 16)

    attention = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *a, **o: attention(*a, **{**o, "implementation": "xla"})
    )
    out = _cudnn(p.scale)(p.q, k, v, p.length)
    np.testing.assert_allclose(out, reference.decode(p).out, atol=2e-5)


def test_candidates_are_interleaved():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    timed = timing.interleaved(calls, {"a": 1, "b": 2}, 3)
    assert order == ["a", "b"] * 4
    assert all(t.least <= t.median <= t.most for t in timed.values())


def test_a_loop_makes_every_step():
    out = timing.loop(lambda q, by: by * q, 3)(jnp.ones((2,)), jnp.float32(1000))
    np.testing.assert_allclose(out, 8.0, rtol=1e-5)
    assert timing.copy_bandwidth(1 << 20, 1, 2) > 0
    assert timing.steps_for(lambda: None, 1, wanted=1e-3, most=7) == 7


def test_the_stand_in_is_only_for_where_it_is_missing(monkeypatch):
    real = sys.modules["jaxtyping"]
    bare.stand_in()
    assert sys.modules["jaxtyping"] is real
    monkeypatch.setitem(sys.modules, "jaxtyping", None)
    bare.stand_in()
    assert sys.modules["jaxtyping"].Float[jax.Array, "B H"] is jax.Array


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"batch": 0}, "batch is 0; give at least 1."),
        ({"mean": -5}, "mean is -5"),
        ({"page_size": 0}, "page_size is 0"),
        ({"sigma": float("nan")}, "sigma is nan; give 0 for equal lengths"),
        ({"live": 0.0}, "live is 0.0"),
        ({"dtype": "float12"}, "dtype is 'float12'"),
        ({"dtype": "int32"}, "dtype is 'int32'"),
        ({"dtype": "complex64"}, "dtype is 'complex64'"),
    ],
)
def test_sizes_that_are_no_problem(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        Sizes(**wrong)
