"""``kvjax bench``: runs the asked-for measurements and prints, and saves, the tables."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.cli import render, session
from kvjax.errors import UsageError

if TYPE_CHECKING:
    from kvjax.bench.report import Report
    from kvjax.bench.run import Bench
    from kvjax.model.load import LanguageModel

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
    from kvjax.bench import machine, report, run
    from kvjax.bench import startup as starting

    if json_path is not None and not json_path.resolve().parent.is_dir():
        raise UsageError(f"--json names a folder that does not exist: {json_path.resolve().parent}.")
    facts = machine.describe()  # before anything loads the machine
    started = starting.measure_startup(model, policies[0]) if startup else None
    if compile_cache:
        session.enable_compile_cache()
    lm = session.load(model, dtype)
    run.check_request(lm.config, rounds=rounds, steps=steps, batch=batches, context=contexts, prefill=prefills)
    bench = run.Bench(lm, parsed, rounds=rounds, steps=steps, peer=_peer(peers, lm), progress=_say)
    result = report.Report(
        machine=facts,
        model=lm.name,
        dtype=str(bench.dtype),
        bandwidth_buffer_bytes=bench.meter.buffer_bytes,
        weight_bytes_per_step=run.weight_bytes_per_step(lm.params, lm.config),
        startup=started,
    )
    _measure(bench, result, batches, contexts, prefills, long_steps)
    if json_path is not None:
        result.save(json_path)
    if markdown:
        print(report.markdown(result))
        return
    for title, columns, rows in report.tables(result):
        render.print_table(title, columns, rows)
    print(report.footnote(result))


def _measure(
    bench: Bench,
    result: Report,
    batches: Sequence[int],
    contexts: Sequence[int],
    prefills: Sequence[int],
    long_steps: int,
) -> None:
    for batch in batches:
        for context in contexts:
            result.decode += bench.decode(batch, context)
    result.bandwidth_readings = bench.meter.readings
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
