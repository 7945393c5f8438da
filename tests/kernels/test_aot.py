"""What is read from a compiler's dumps, which limits break, and the page; nothing here compiles for an accelerator."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from tools.aot import cases_decode, kernels_page, seconds, step_limit, tpu_profile
from tools.aot import compile as aot_compile
from tools.aot.cases import Case, collect
from tools.aot.compile import Result, _broken, selected
from tools.aot.step_cost import StepCost, step_cost
from tools.aot.targets import TPU_TARGETS

SCHEDULE = """\
LB: loop body
     0   :  { %s1 = smov 1 }
   0x1 LB: > { %s2 = sadd.s32 1, %s1 }
   0x2   :  {}
   0x3   :  { %s3 = smov 1 }
   0x4 LB: > { %v1 = vld [vmem:[%s1] sm:$0xff]  ;;  %s4 = sadd.s32 1, %s2 }
   0x5   :  {}
   0x6   :  {}
   0x7 LB: >> { %v2 = vmul.f32 %v1, %v1 }
   0x8   : > { %s5 = sadd.s32 1, %s2 } /* End region 11 */
   0x9   :  { %s6 = smov 1 }
"""
UTILIZATION = """\
== CAPACITY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    2     2     4     2     1     3     3     2     2     2
== UTILIZATION:
0 0 0 0 0 1 1 0 0 2
0 0 0 0 0 0 0 1 2 2
"""


def test_cycles_of_the_longest_loop_and_spills(tmp_path):
    (tmp_path / "12-step.1-07-packed-bundles-post-ra.txt").write_text(SCHEDULE)
    (tmp_path / "12-step.1-08-final_hlo-static-per-bundle-utilization.txt").write_text(UTILIZATION)
    (tmp_path / "12-TLP-07-packed-bundles-post-ra.txt").write_text(SCHEDULE)
    (tmp_path / "13-copy-07-packed-bundles-post-ra.txt").write_text("     0   :  { %s1 = smov 1 }\n")
    assert tpu_profile.profiles(tmp_path) == [
        tpu_profile.KernelProfile("step", bundles=3, cycles=5, spills=2),
        tpu_profile.KernelProfile("copy"),
    ]


def test_limits():
    case = Case("a", "step", jnp.sin, (), cache_bytes=1000, bundles={"v5e": 10}, spills=1)
    kept = Result("a", "step", "v5e", temp_bytes=9, cache_bytes=1000, bundles=10, spills=1)
    assert _broken(case, kept) == ()
    wrong = Result("a", "step", "v5e", temp_bytes=10, cache_bytes=1000, bundles=11, spills=2)
    assert [line.split()[1] for line in _broken(case, wrong)] == ["temporary", "spills,", "bundles,"]
    unread = Result("a", "step", "v5e", cache_bytes=1000, calls=1)
    assert _broken(case, unread) == ("the compiler left nothing to read of its kernels",)
    assert _broken(case, dataclasses.replace(unread, read=1)) == ()


def test_page():
    results = [
        Result("a", "step", "v5e", bundles=10, cycles=20, memory_cycles=30, temp_bytes=1, cache_bytes=1000),
        Result("a", "step", "sm_90", registers=96, cache_bytes=1000),
        Result("b", "step", "v5e", error="ValueError: no"),
        Result("b", "step", "sm_90", spills=4, registers=255, cache_bytes=1000, broken=("4 spills, at most 0",)),
    ]
    page = kernels_page.render(results, {"jax": "0.10.2"}, "2026-01-01")
    assert "2026-01-01; jax 0.10.2." in page
    assert "| a | 20/30 cycles, 10 b, 0.1 % | 96 r, 0.0 % |" in page
    assert "| b | **fails** | **255 r, 4 spills, 0.0 %** |" in page
    assert "- step, b, v5e: ValueError: no\n- step, b, sm_90: 4 spills, at most 0\n" in page


def test_cases_are_named_once_and_trace():
    """Shapes only: that every case is one that the operation accepts, in the reference's own form."""
    cases = collect(["tools.aot.cases_decode", "tools.aot.there_is_none"])
    assert len({case.name for case in cases}) == len(cases)
    case = cases_decode.case("xla", cases_decode.Shape(log_mass=True, alibi=True), "xla", ("tpu",))
    out = jax.eval_shape(case.function, *case.arguments)
    assert out.out.shape == (8, 8, 8, 128)


@pytest.mark.parametrize(("operations", "named", "some"), [([], "", True), (["other"], "", False), ([], "int8", True)])
def test_selection(operations, named, some):
    cases = cases_decode.cases()
    chosen = selected(cases, TPU_TARGETS[0], operations, named)
    assert bool(chosen) == some and all(named in case.name for case in chosen)
    assert not any("float8" in case.name for case in chosen)


def test_a_case_of_which_nothing_can_be_read_is_asked_for_again_in_a_new_process(monkeypatch, tmp_path):
    """Unless it is the process's first, when there is nothing to wait for."""
    cases = [Case(name, "step", jnp.sin, (), cache_bytes=1000, platforms=("tpu",)) for name in ("a", "b")]
    read = {"a": 1, "b": 0}
    monkeypatch.setattr(aot_compile, "collect", lambda _: cases)
    monkeypatch.setattr(
        aot_compile, "compile_case", lambda case, *_: Result(case.name, "step", "v5e", calls=1, read=read[case.name])
    )
    out = tmp_path / "results"

    def run(skip: int) -> list[str]:
        given = ["--target", "v5e", "--modules", "x", "--skip", str(skip), "--dump", str(tmp_path), "--out", str(out)]
        monkeypatch.setattr("sys.argv", ["compile", *given])
        out.write_text("")
        aot_compile.main()
        return [line["case"] for line in map(json.loads, out.read_text().splitlines()) if "seconds" in line]

    with pytest.raises(SystemExit) as ended:
        run(0)
    assert ended.value.code == aot_compile.AGAIN
    assert [json.loads(line)["case"] for line in out.read_text().splitlines()] == ["a", "a", "b"]
    assert run(1) == ["b"]


def test_a_section_is_replaced_where_it_is_or_added_at_the_end():
    page = kernels_page.with_section("# Page\n\n## a\n\nx\n\n## b\n\ny\n", "c", "z\n")
    assert page == "# Page\n\n## a\n\nx\n\n## b\n\ny\n\n## c\n\nz\n"
    page = kernels_page.with_section(page, "b", "new")
    assert page == "# Page\n\n## a\n\nx\n\n## b\n\nnew\n\n## c\n\nz\n"
    assert kernels_page.with_section(page, "c", "z") == page


def test_seconds_are_the_least_of_each_stage_and_compared_with_32_layers():
    def run(layers: int, *taken: float) -> seconds.Measured:
        stages = dict(zip(seconds.STAGES, taken, strict=True))
        return seconds.Measured("v5e", "8B" if layers < 80 else "70B", layers, "decode", stages, 1000 * layers)

    best = seconds.least([run(32, 1, 1, 9), run(32, 2, 0.5, 8)])
    assert best.seconds == {"trace": 1, "lower": 0.5, "compile": 8}
    text = seconds.section([run(8, 1, 1, 3), best, run(80, 1, 1, 17)], 2)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| v5e")]
    assert [row[7] for row in rows] == ["0.53", "1.00", "2.00"]
    assert rows[1][2:7] == ["Llama 3.1 8B, 32 layers", "1.0", "0.5", "8.0", "9.5"]
    assert "A layer of 8B adds 0.19 s (v5e, decode)." in text


#: Three layers of a step: a copy ahead and a kernel in each, a branch, and the head.
STEP = """\
HloModule jit_step, is_scheduled=true

%dear (x: f32[8]) -> f32[8] {
  ROOT %e = f32[8]{0} fusion(%x), kind=kLoop, backend_config={"window_config":{"estimated_cycles":"900"}}
}

%cheap (x: f32[8]) -> f32[8] {
  ROOT %c = f32[8]{0} copy(%x), backend_config={"window_config":{"estimated_cycles":"2"}}
}

%body (p: (f32[8], s32[])) -> (f32[8], s32[]) {
  %f.0 = f32[8]{0} fusion(%p), kind=kLoop, backend_config={"window_config":{"estimated_cycles":"10"}}
  %ragged_decode.1 = f32[8]{0:T(128)} custom-call(%f.0), custom_call_target="tpu_custom_call"
  %copy-start.1 = (bf16[4,16]{1,0:T(8,128)}, bf16[4,16]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%w.1)
  %all-reduce.1 = f32[8]{0} all-reduce(%ragged_decode.1), to_apply=%sum
  %f.1 = f32[8]{0} fusion(%p), kind=kLoop, backend_config={"window_config":{"estimated_cycles":"100"}}
  %ragged_decode.2 = f32[8]{0:T(128)} custom-call(%f.1), custom_call_target="tpu_custom_call"
  %copy-start.2 = (bf16[4,16]{1,0:T(8,128)}, bf16[4,16]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%w.2)
  %copy-start.3 = (f32[64]{0:S(1)}, f32[64]{0}, u32[]{:S(2)}) copy-start(%f.1)
  %all-reduce.2 = f32[8]{0} all-reduce(%ragged_decode.2), to_apply=%sum
  %f.2 = f32[8]{0} fusion(%p), kind=kLoop, backend_config={"window_config":{"estimated_cycles":"100"}}
  %ragged_decode.3 = f32[8]{0:T(128)} custom-call(%f.2), custom_call_target="tpu_custom_call"
  %head = f32[8]{0} fusion(%p), kind=kOutput, backend_config={"window_config":{"estimated_cycles":"5000"}}
  %if = f32[8]{0} conditional(%on, %head, %head), branch_computations={%cheap, %dear}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %while = (f32[8], s32[]) while(%t), condition=%less, body=%body
}
"""


def test_a_step_of_a_whole_model_is_counted_from_one_of_few_layers():
    assert step_cost(STEP, 3, 3) == StepCost(10 + 200 + 5000 + 2, kernels=3, copied_bytes=2 * 128, collectives=2)
    whole = step_cost(STEP, 3, 32)
    assert whole == StepCost(10 + 31 * 100 + 5000 + 2, kernels=32, copied_bytes=31 * 128, collectives=31)
    with pytest.raises(ValueError, match="3 kernels in 2 layers"):
        step_cost(STEP, 2, 32)


def test_a_step_beside_the_limit_of_its_bytes():
    """A v5e's clock is 1.5 GHz, its memory's speed 0.82 TB/s."""
    step = step_limit.Step(
        "v5e", "full", weights=410_000_000, cache=410_000_000, cycles=750_000, copied=82_000_000, collectives=2,
        blocks=1000, block_cycles=300, block_bytes=410_000,
    )  # fmt: skip
    assert step.limit == pytest.approx(1.0) and step.operations == pytest.approx(0.5)
    assert step.copies == pytest.approx(0.1) and step.attention == pytest.approx(0.5)  # a block's bytes take 750 cycles
    slow = dataclasses.replace(step, block_cycles=1500)
    assert slow.attention == pytest.approx(1.0)
    row = "| v5e | full | 410 | 410 | 1.00 | 0.50 | 0.50 | 0.10 | 1.10 | 91% |"
    assert row in step_limit.section([step])
