"""The benchmark's results as tables for people (plain or Markdown) and as JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.bench.run import DecodeRow, LongRow, PrefillRow
from kvjax.bench.startup import Startup
from kvjax.files import write_atomically
from kvjax.tables import human_bytes, human_rate


@dataclasses.dataclass
class Report:
    """Everything one run measured."""

    machine: dict[str, Any]
    model: str
    dtype: str
    bandwidth_buffer_bytes: int
    weight_bytes_per_step: int
    bandwidth_readings: list[float] = dataclasses.field(default_factory=list)
    decode: list[DecodeRow] = dataclasses.field(default_factory=list)
    prefill: list[PrefillRow] = dataclasses.field(default_factory=list)
    long: list[LongRow] = dataclasses.field(default_factory=list)
    startup: Startup | None = None

    def save(self, path: Path) -> None:
        """Write JSON, whole or not at all; one sentence when the file cannot be written."""
        write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


Table = tuple[str, list[str], list[list[str]]]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def tables(report: Report) -> list[Table]:
    """Title, columns and rows of every table there is something for."""
    peer = any(row.speedup_over_peer is not None for row in (*report.decode, *report.prefill))
    over = ["x peer"] if peer else []
    found: list[Table] = []
    if report.decode:
        columns = ["batch", "context", "policy", "prefill tokens/s", "decode tokens/s", *over]
        columns += ["of limit", "cache", "live", "peak"]
        rows = [
            [str(r.batch), str(r.context), r.candidate]
            + [human_rate(r.prefill_tokens_per_second), human_rate(r.tokens_per_second)]
            + ([_ratio(r.speedup_over_peer)] if peer else [])
            + [
                "" if r.limit_share is None else f"{r.limit_share:.0%}",
                human_bytes(r.cache_bytes),
                human_bytes(r.live_cache_bytes),
            ]
            + [human_bytes(r.peak_bytes)]
            for r in report.decode
        ]
        found.append(("Prefill and decode", columns, rows))
    if report.prefill:
        rows = [
            [str(r.prompt_tokens), r.candidate, human_rate(r.tokens_per_second)]
            + ([_ratio(r.speedup_over_peer)] if peer else [])
            + [human_bytes(r.peak_bytes)]
            for r in report.prefill
        ]
        found.append(("Prefill, batch 1", ["prompt", "policy", "prefill tokens/s", *over, "peak"], rows))
    if report.long:
        rows = [
            [r.policy, str(r.few), f"{r.few_seconds * 1e3:.2f} ms", str(r.many), f"{r.many_seconds * 1e3:.2f} ms"]
            + [f"{r.ratio:.3f}", human_bytes(r.few_cache_bytes), human_bytes(r.many_cache_bytes)]
            for r in report.long
        ]
        columns = ["policy", "after", "step", "after", "step", "ratio", "cache", "cache"]
        found.append(("A decode step after few and after many generated tokens, batch 1", columns, rows))
    if report.startup:
        s = report.startup
        rows = [[f"{s.cold_compile:.1f} s", f"{s.cold_total:.1f} s", f"{s.second_first_token:.1f} s"]]
        columns = ["cold compilation", "first process, all of it", "second process, start to first text"]
        found.append(("Starting", columns, rows))
    return found


def footnote(report: Report) -> str:
    """What the numbers mean and where they come from."""
    m, versions = report.machine, report.machine["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version and name != "jaxlib")
    said = (
        f"{report.model}, {report.dtype}; {m['processor']}, {m['cores']} cores, {human_bytes(m['memory_bytes'])}; "
        f"Python {m['python']}, {named}; {m['date'][:10]}. Medians of rounds taken in turn. "
    )
    if report.bandwidth_readings:
        rate, size = statistics.median(report.bandwidth_readings), report.bandwidth_buffer_bytes
        total = sum(len(row.rounds) for row in report.decode)
        unsteady = total - sum(row.steady_rounds for row in report.decode)
        said += (
            f"Limit: the bytes a step must read ({human_bytes(report.weight_bytes_per_step)} of weights, and the "
            f"cache that is live then) at the bandwidth measured before and after it (reading {human_bytes(size)}; "
            f"median {rate / 1e9:.1f} GB/s); {unsteady} of {total} rounds, in which those differ by over 15 %, do not "
            f"count for it where a case has others. "
        )
    return said + "Peak: memory in use while the case ran, beyond what was in use before its cache existed."


def markdown(report: Report) -> str:
    """All tables and the footnote as Markdown."""
    parts = []
    for title, columns, rows in tables(report):
        lines = [f"**{title}**", "", _row(columns), _row(["---"] * len(columns)), *(_row(row) for row in rows)]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, footnote(report)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
