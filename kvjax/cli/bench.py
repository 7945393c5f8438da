"""``kvjax bench``: runs the asked-for measurements and prints, and saves, the tables."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.cli import session
from kvjax.errors import KvjaxError, UsageError
from kvjax.files import check_writable, write_atomically

if TYPE_CHECKING:
    from kvjax.bench.bench_report import Measurements
    from kvjax.bench.run import Bench
    from kvjax.checkpoints.load import LanguageModel
    from kvjax.tables import Report
    from pallas_kernels.bench.problem import Sizes

PEERS = ("transformers",)


def run(
    *,
    model: str,
    dtype: str | None,
    batches: Sequence[int],
    contexts: Sequence[int],
    policies: Sequence[str],
    prefills: Sequence[int],
    rounds: int,
    steps: int,
    peers: Sequence[str],
    long_steps: int,
    startup: bool,
    json_path: Path | None,
    markdown: bool,
    compile_cache: bool,
) -> None:
    """Measure and report; what is asked for is checked before anything is timed."""
    from kvjax.policies import parse

    parsed = {text: parse(text) for text in policies}
    _check_peers(peers)
    from kvjax.bench import bench_report, machine, run
    from kvjax.bench import startup as starting

    _check_json(json_path)
    facts = machine.describe()  # before anything loads the machine
    started = starting.measure_startup(model, policies[0]) if startup else None
    if compile_cache:
        session.enable_compile_cache()
    lm = session.load(model, dtype)
    sizes = {"batch": batches, "context": contexts, "prefill": prefills}
    run.check_request(lm.config, rounds=rounds, steps=steps, long_steps=long_steps, **sizes)
    bench = run.Bench(lm, parsed, rounds=rounds, steps=steps, peer=_peer(peers, lm), progress=_say)
    result = bench_report.Measurements(
        machine=facts,
        model=lm.name,
        dtype=str(bench.dtype),
        bandwidth_buffer_bytes=bench.meter.buffer_bytes,
        weight_bytes_per_step=run.weight_bytes_per_step(lm.params, lm.config),
        startup=started,
    )
    try:
        _measure(bench, result, batches, contexts, prefills, long_steps)
    finally:  # Ctrl-C loses none of the cases that are done
        result.bandwidth_readings = bench.meter.readings
        if result.decode or result.prefill:
            _publish(bench_report.report(result), json_path, markdown)


def _publish(found: Report, json_path: Path | None, markdown: bool) -> None:
    if json_path is not None:
        write_atomically(json_path, found.json())
    found.print(markdown=markdown)


def decode(
    shape: str,
    dtype: str,
    batches: Sequence[int],
    contexts: Sequence[int],
    policies: Sequence[str],
    rounds: int,
    json_path: Path | None,
    markdown: bool,
) -> None:
    """Whole decode steps with random weights."""
    from kvjax.bench import shapes

    _check_json(json_path)
    rows = shapes.measure(shape, batches, contexts, policies, dtype=dtype, rounds=rounds, say=_say)
    _publish(shapes.report(rows, shapes.facts(shape, dtype)), json_path, markdown)


def kernels(
    means: Sequence[int], batch: int | None, sizes: dict[str, Any], rounds: int, json_path: Path | None
) -> None:
    """Kernels alone."""
    from pallas_kernels import dispatch
    from pallas_kernels.bench import decode as measured

    _check_json(json_path)
    accelerated = dispatch.platform() in ("gpu", "tpu")
    # A CPU is given as much as it reads in a second.
    means = means or ((2048, 16384) if accelerated else (256,))
    batch = (16 if accelerated else 2) if batch is None else batch
    if rounds < 1:
        raise UsageError(f"rounds is {rounds}; give at least 1.")
    problems = [problem_sizes(mean=mean, batch=batch, **sizes) for mean in means]
    reports = []
    for problem in problems:
        report = measured.run(problem, rounds=rounds)
        print(report.markdown(), flush=True)
        reports.append(report)
    if json_path is not None:
        write_atomically(json_path, "[" + ",\n".join(report.json() for report in reports) + "]\n")


def tune(
    path: Path, operations: Sequence[str], sizes: dict[str, Any], queries: Sequence[int], tokens: Sequence[int]
) -> None:
    """Search block sizes; of all operations where none is named."""
    from pallas_kernels.tunable import OPERATIONS, cases
    from pallas_kernels.tune import NothingToTune
    from pallas_kernels.tune import run as search

    check_writable("The file", path)
    problem = problem_sizes(**sizes)
    try:
        given = cases(operations or tuple(OPERATIONS), problem, queries=queries, tokens=tokens)
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        search(path, given)
    except (NothingToTune, ValueError) as error:
        raise KvjaxError(str(error)) from error


def problem_sizes(**sizes: Any) -> Sizes:
    """A kernel's problem by its sizes; one sentence where it is none."""
    from pallas_kernels.bench.problem import Sizes

    try:
        return Sizes(**sizes)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_json(path: Path | None) -> None:
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
    for peer in peers:
        if peer not in PEERS:
            near = difflib.get_close_matches(peer, PEERS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(PEERS)}."
            raise UsageError(f"Unknown peer {peer!r}; {hint}")


def _peer(peers: Sequence[str], lm: LanguageModel) -> Any:
    if not peers:
        return None
    dtype = str(lm.params.dtype)
    if dtype != "float32":
        raise UsageError(f"--peer transformers compares in float32; add --dtype float32 (the model is {dtype}).")
    from kvjax.bench.transformers_peer import TransformersPeer

    return TransformersPeer(lm.params, lm.config)


def _say(what: str) -> None:
    print(f"kvjax bench: {what}", file=sys.stderr, flush=True)
