"""``kvjax bench``: runs the asked-for measurements and prints, and saves, the tables."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvjax.checks import whole_number
from kvjax.cli import first_steps, inputs
from kvjax.cli import options as flag
from kvjax.cli.app import app
from kvjax.errors import UsageError, did_you_mean, quoted
from kvjax.files import check_writable, write_atomically

if TYPE_CHECKING:
    from kvjax.bench.bench_report import Measurements
    from kvjax.bench.measurements import Bench, Peer
    from kvjax.checkpoints.load import LanguageModel
    from kvjax.tables import Report
    from pallas_kernels.bench.kernel_report import Report as KernelReport

say = functools.partial(first_steps.say, "bench")

PEERS = ("transformers", "llama.cpp", "floats")

group = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
app.add_typer(group, name="bench")

SaveJson = Annotated[Path | None, typer.Option("--json", help="Save everything measured to this file.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")]


@group.callback(invoke_without_command=True)
def bench(
    context_: typer.Context,
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    batch: Annotated[str, typer.Option("--batch", help="Comma-separated batch sizes.")] = "1,8",
    context: Annotated[str, typer.Option("--context", help="Comma-separated tokens in the cache.")] = "256,4096",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", help="Policy to time, such as lagkv:ratio=0.25; may be given several times; full by default."
        ),
    ] = None,
    prefill: Annotated[str, typer.Option("--prefill", help="Comma-separated prompt lengths to time.")] = "2000",
    rounds: Annotated[int, typer.Option("--rounds", help="Interleaved repetitions; the median is reported.")] = 5,
    steps: Annotated[int, typer.Option("--steps", help="Tokens decoded per repetition.")] = 32,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer", help="Also time `transformers` (torch), `llama.cpp` (a GGUF), or with --weights `floats`."
        ),
    ] = None,
    long_steps: Annotated[
        int, typer.Option("--long-steps", help="Also compare a step after 100 and after this many generated tokens.")
    ] = 0,
    startup: Annotated[bool, typer.Option("--startup", help="Also time compilation and a second process.")] = False,
    json: SaveJson = None,
    markdown: AsMarkdown = False,
    compile_cache: flag.CompileCache = True,
) -> None:
    """Measure speed, cache bytes and peak memory.

    Decode is also given as a fraction of the limit: the bytes a step must read at the memory bandwidth measured in the
    same run. `kvjax bench kernels` and `kvjax bench decode` measure kernels alone, and whole steps of a model's shape
    with random weights.
    """
    if context_.invoked_subcommand is not None:
        return
    from kvjax.policies import parse

    batches, contexts, prefills = (
        inputs.integers(text, name) or ()
        for text, name in ((batch, "--batch"), (context, "--context"), (prefill, "--prefill"))
    )
    if not ((batches and contexts) or prefills or long_steps or startup):
        raise UsageError("Nothing is to be measured: give --batch and --context, --prefill, --long-steps or --startup.")
    policies, peers = tuple(policy or ("full",)), tuple(peer or ())
    parsed = {text: parse(text) for text in policies}
    _check_peers(peers)
    from kvjax.bench import bench_report, cold_start, machine, measurements
    from kvjax.runtime.synthetic import weight_bytes_per_step

    check_json(json)
    facts = machine.describe()  # before anything loads the machine
    started = cold_start.measure_startup(model, policies[0], dtype=dtype, weights=weights) if startup else None
    lm = first_steps.load(model, dtype, compile_cache=compile_cache, weights=weights)
    sizes = {"batch": batches, "context": contexts, "prefill": prefills}
    with inputs.naming_flags("rounds", "steps", "long_steps", *sizes):
        measurements.check_request(lm.config, rounds=rounds, steps=steps, long_steps=long_steps, **sizes)
    timed = _peer(peers, lm, steps, (rounds + 3) * steps)
    bench = measurements.Bench(lm, parsed, rounds=rounds, steps=steps, peer=timed, progress=say)
    result = bench_report.Measurements(
        machine=facts,
        model=lm.name,
        dtype=lm.params.number_format,
        bandwidth_buffer_bytes=bench.meter.buffer_bytes,
        weight_bytes_per_step=weight_bytes_per_step(lm.params),
        startup=started,
        peer=None if timed is None else f"{timed.name}, {timed.about}",
    )
    try:
        _measure(bench, result, batches, contexts, prefills, long_steps)
    finally:  # Ctrl-C loses none of the cases that are done
        result.bandwidth_readings = bench.meter.readings
        if bench_report.tables(result):
            publish(bench_report.report(result), json, markdown)


def publish(found: Report, json_path: Path | None, markdown: bool) -> None:
    """Print what was measured, and write it as JSON where that is asked for."""
    if json_path is not None:
        write_atomically(json_path, found.json())
    found.print(markdown=markdown)


@group.command()
def decode(
    shape: Annotated[str, typer.Option("--shape", help="llama-3.1-8b, smollm2-135m or tiny.")] = "llama-3.1-8b",
    dtype: flag.Dtype = "bfloat16",
    batch: Annotated[str, typer.Option("--batch", help="Comma-separated batch sizes.")] = "1,8,32",
    context: Annotated[str, typer.Option("--context", help="Comma-separated tokens in the cache.")] = "32768",
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="May be given several times; by default all, at 1/8 but full."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Repetitions; the median is reported.")] = 5,
    json: SaveJson = None,
    markdown: AsMarkdown = False,
) -> None:
    """Measure whole decode steps of a model's shape with random weights: no weights are needed.

    Random weights have no profiles, so these are made up: `razor` protects KV heads spread evenly over the model, which
    hold half of its ratio; `round` has its watershed at 45 % of the layers, and is measured as an answer is decoded,
    with the rounds that were selected (`top`) on the device. Bringing them there is a question's cost, not a step's.
    """
    from kvjax.bench import shapes

    check_json(json)
    dtype = dtype or "bfloat16"
    sizes = inputs.integers(batch, "--batch") or (), inputs.integers(context, "--context") or ()
    with inputs.naming_flags("batch", "context", "rounds"):
        rows = shapes.measure(shape, *sizes, tuple(policy or ()), dtype=dtype, rounds=rounds, say=say)
    publish(shapes.report(rows, shapes.facts(shape, dtype)), json, markdown)


@group.command()
def start(
    model: flag.Model = flag.DEFAULT_MODEL,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="Policy whose programs are counted; may be given several times."),
    ] = None,
    repetitions: Annotated[int, typer.Option("--repetitions", help="Later processes; the best one counts.")] = 3,
    json: SaveJson = None,
    markdown: AsMarkdown = False,
) -> None:
    """Measure starting: seconds until commands answer, and the programs that conversations and requests compile.

    Commands are timed as processes of their own, first with nothing compiled. Programs are counted with a toy model.
    """
    check_json(json)
    whole_number("--repetitions", repetitions, 1, 100)
    together = "adaptive:ratio=0.5,inner=kvzip,scope=model"
    usual = "full", "lagkv:ratio=0.5", "streamingllm:window=256", "h2o:ratio=0.5", together, "round:watershed=4"
    policies = tuple(policy or usual)
    for each in policies:
        first_steps.check_policy(each)
    from kvjax.bench.first_hour import measure

    publish(measure(model, policies, repetitions=repetitions, say=say), json, markdown)


@group.command()
def kernels(
    mean: Annotated[str | None, typer.Option("--mean", help="Comma-separated mean slots per head.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Prompts in the batch.")] = None,
    heads: Annotated[int, typer.Option("--heads", help="KV heads.")] = 8,
    group: Annotated[int, typer.Option("--group", help="Query heads that share a KV head.")] = 4,
    head_dim: Annotated[int, typer.Option("--head-dim", help="Head dimension.")] = 128,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Dtype of keys and values, such as bfloat16, int8, float8_e4m3fn.")
    ] = "bfloat16",
    sigma: Annotated[float, typer.Option("--sigma", help="Log-normal spread of the heads' lengths.")] = 0.8,
    rounds: Annotated[int, typer.Option("--rounds", help="Interleaved repetitions.")] = 10,
    json: SaveJson = None,
) -> None:
    """Measure every decode kernel of this platform, beside other implementations, against the memory bandwidth."""
    from pallas_kernels import dispatch
    from pallas_kernels.bench import decode as measured

    check_json(json)
    accelerated = dispatch.platform() in ("gpu", "tpu")
    # A CPU is given as much as it reads in a second.
    sizes = dict(heads=heads, group=group, head_dim=head_dim, dtype=dtype, sigma=sigma)
    means = (None if mean is None else inputs.integers(mean, "--mean")) or ((2048, 16384) if accelerated else (256,))
    batch = (16 if accelerated else 2) if batch is None else batch
    whole_number("--rounds", rounds, 1)
    problems = [inputs.problem_sizes(mean=mean, batch=batch, **sizes) for mean in means]
    reports = []
    for problem in problems:
        report = measured.run(problem, rounds=rounds)
        _kernel_report(report).print(markdown=not sys.stdout.isatty())
        reports.append(report)
    if json is not None:
        write_atomically(json, "[" + ",\n".join(report.json() for report in reports) + "]\n")


def _kernel_report(found: KernelReport) -> Report:
    """The table of kernels."""
    from kvjax.tables import Column, Heading, Report, Table
    from pallas_kernels.bench.kernel_report import COLUMNS

    columns = [Column(name, text, right=number > 0) for number, (name, text) in enumerate(COLUMNS.items())]
    table = Table(columns, found.rows, note=lambda row: row.refused, labels=1)
    return Report([Heading(found.title), found.facts, table])


def check_json(path: Path | None) -> None:
    """Refuse a place for --json that cannot be written, before anything is measured."""
    if path is not None:
        check_writable("--json", path)


def _measure(
    bench: Bench,
    result: Measurements,
    batches: Sequence[int],
    contexts: Sequence[int],
    prefills: Sequence[int],
    long_steps: int,
) -> None:
    for batch in batches:
        for context in contexts:
            result.decode += bench.decode(batch, context)
    for prompt_tokens in prefills:
        result.prefill += bench.prefill(prompt_tokens)
    if long_steps:
        result.long += bench.long(long_steps)


def _check_peers(peers: Sequence[str]) -> None:
    if len(set(peers)) > 1:
        raise UsageError("A run has one --peer; give each a run of its own.")
    for peer in peers:
        if peer not in PEERS:
            raise UsageError(f"Unknown peer {quoted(peer)};{did_you_mean(peer, PEERS)} known are {', '.join(PEERS)}.")
    if "llama.cpp" in peers:
        import kvjax.bench.llama_cpp_peer  # noqa: F401 - that it is not installed is said before the model is loaded


def _peer(peers: Sequence[str], lm: LanguageModel, steps: int, room: int) -> Peer | None:
    if not peers:
        return None
    dtype = str(lm.params.dtype)
    if peers[0] == "llama.cpp":
        from kvjax.bench.llama_cpp_peer import LlamaCppPeer

        return LlamaCppPeer(lm.name, steps)
    if peers[0] == "floats":
        if lm.config.weights is None:
            raise UsageError("--peer floats is what quantised weights are compared with; add --weights int8.")
        from kvjax.bench.floats_peer import FloatsPeer

        return FloatsPeer(first_steps.load(lm.name, dtype), steps, room)
    if dtype != "float32":
        raise UsageError(f"--peer transformers compares in float32; add --dtype float32 (the model is {dtype}).")
    from kvjax.bench.transformers_peer import TransformersPeer

    return TransformersPeer(lm.params, lm.config)
