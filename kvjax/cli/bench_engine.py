"""``kvjax bench engine``: in-flight batching beside static batches, measured or simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.checks import number, whole_number
from kvjax.cli import first_steps, inputs
from kvjax.cli import options as flag
from kvjax.cli.bench import AsMarkdown, SaveJson, check_json, group, publish, say
from kvjax.errors import UsageError, quoted
from kvjax.files import check_picture

if TYPE_CHECKING:
    from kvjax.checkpoints.load import LanguageModel
    from kvjax.engine.engine_report import EngineReport
    from kvjax.engine.simulate import Arrival
    from kvjax.policies import Policy
    from kvjax.tables import Report


@group.command()
def engine(
    model: flag.Model = flag.DEFAULT_MODEL,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="May be given several times, each with its own --slots.")
    ] = None,
    slots: Annotated[str, typer.Option("--slots", help="Comma-separated slots, one number or one per policy.")] = "8",
    requests: Annotated[int, typer.Option("--requests", help="Requests of the trace.")] = 500,
    prompt: Annotated[str, typer.Option("--prompt", help="Prompt tokens: median, least, most.")] = "80,20,600",
    new: Annotated[
        str,
        typer.Option(
            "--new", help="Generated tokens: median, mean, most; mean over median sets the spread, of prompts too."
        ),
    ] = "60,100,600",
    per_second: Annotated[
        float | None, typer.Option("--per-second", help="With --simulate: arrivals a second; by default all at once.")
    ] = None,
    static: Annotated[
        bool | None,
        typer.Option("--static/--no-static", help="Whether to time static batches too; by default they are."),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Replay the trace with given times; no model runs.")
    ] = False,
    step_ms: Annotated[
        float | None, typer.Option("--step-ms", help="With --simulate: milliseconds per decode step, by default 12.")
    ] = None,
    prefill_rate: Annotated[
        float | None,
        typer.Option(
            "--prefill-rate", help="With --simulate: prompt tokens a second on each device row, by default 40,000."
        ),
    ] = None,
    shards: Annotated[
        int | None, typer.Option("--shards", help="With --simulate: devices of the data axis, by default 1.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the trace.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Draw the timeline of slots into this PNG file.")] = None,
    json: SaveJson = None,
    markdown: AsMarkdown = False,
    compile_cache: flag.CompileCache = True,
) -> None:
    """Measure in-flight batching against static batches, or simulate it with given times.

    Requests have log-normal lengths, which are not known in advance. With several policies each is served by an engine
    of its own, and compared with the first.
    """
    check_json(json)
    if out is not None:
        check_picture("--out", out)
    trace = _trace(requests, prompt, new, per_second, seed)
    policies = tuple(policy or ("full",))
    counts = _slots(slots, len(policies))
    if simulate:
        of_measurement = {
            "--model": None if model == flag.DEFAULT_MODEL else model,
            "--policy": policy,
            "--weights": weights,
            "--dtype": dtype,
            "--static": static,
        }
        _refuse(of_measurement, "is of a measurement, and --simulate runs no model; leave it out.")
        found = _simulated(trace, step_ms, prefill_rate, counts[0], shards)
        publish(found.report(), json, markdown)
    else:
        of_simulation = {
            "--per-second": per_second,
            "--step-ms": step_ms,
            "--prefill-rate": prefill_rate,
            "--shards": shards,
        }
        _refuse(of_simulation, "is of a simulation; add --simulate, or leave it out.")
        from kvjax.policies import parse

        chosen = [parse(text) for text in policies]
        lm = first_steps.load(model, dtype, compile_cache=compile_cache, weights=weights)
        report, found = _measured(lm, chosen, counts, trace, static is not False)
        publish(report, json, markdown)
    if out is not None:
        from kvjax.engine.timeline import draw

        draw(found, out)


def _trace(requests: int, prompt: str, new: str, per_second: float | None, seed: int) -> list[Arrival]:
    """The requests that the flags ask for."""
    from kvjax.bench.engine import three_numbers
    from kvjax.engine.simulate import lognormal_trace

    prompts, answers = three_numbers("--prompt", prompt), three_numbers("--new", new)
    if not prompts[1] <= prompts[0] <= prompts[2]:
        raise UsageError(
            f"--prompt is {quoted(prompt)}; its second number is the least, the third the most, and the first, the "
            "median, lies between."
        )
    if not answers[0] <= answers[1] <= answers[2]:
        raise UsageError(
            f"--new is {quoted(new)}; the mean, its second number, is at least the median and at most the third, the "
            "most."
        )
    whole_number("--requests", requests, 1, 10**7)
    whole_number("--seed", seed, 0)
    if per_second is not None:
        number("--per-second", per_second, 0.0, open_below=True)
    return lognormal_trace(
        requests,
        **dict(zip(("prompt_median", "prompt_least", "prompt_most"), prompts, strict=True)),
        **dict(zip(("new_median", "new_mean", "new_most"), answers, strict=True)),
        per_second=per_second,
        seed=seed,
    )


def _slots(text: str, policies: int) -> list[int]:
    """The slots of each policy's engine."""
    counts = list(inputs.integers(text, "--slots") or (8,))
    for count in counts:
        whole_number("--slots", count, 1, 2**16)
    if len(counts) not in (1, policies):
        raise UsageError(
            f"--slots has {len(counts)} numbers, and policies are {policies}; give one number, or one each."
        )
    return counts * policies if len(counts) == 1 else counts


def _refuse(flags: dict[str, Any], why: str) -> None:
    """Refuse (UsageError) flags that were given and are of the other way to run the trace."""
    for name, given in flags.items():
        if given is not None:
            raise UsageError(f"{name} {why}")


def _measured(
    lm: LanguageModel, policies: Sequence[Policy], slots: Sequence[int], trace: Sequence[Arrival], static: bool
) -> tuple[Report, EngineReport]:
    """The report of every policy's engine, and the last one's own."""
    from kvjax.bench import engine as bench

    rows, found = [], None
    for policy, count in zip(policies, slots, strict=True):
        made, found = bench.measure(lm, policy, trace, slots=count, static=static, say=say)
        rows += made
    assert found is not None, "there is one policy at least"
    return bench.report(rows, found, bench.facts(lm, len(trace), trace)), found


def _simulated(
    trace: list[Arrival], step_ms: float | None, prefill_rate: float | None, slots: int, shards: int | None
) -> EngineReport:
    from kvjax.engine.simulate import Times, simulate

    step_ms = 12.0 if step_ms is None else step_ms
    prefill_rate = 40_000.0 if prefill_rate is None else prefill_rate
    shards = 1 if shards is None else shards
    whole_number("--shards", shards, 1, 2**16)
    if slots % shards:
        raise UsageError(f"--slots is {slots} and --shards {shards}; give a multiple of the shards.")
    number("--step-ms", step_ms, 0.0, open_below=True)
    number("--prefill-rate", prefill_rate, 1.0)
    return simulate(trace, Times(step_ms / 1000, 1 / prefill_rate), slots=slots, shards=shards)
