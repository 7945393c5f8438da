"""The benchmark's results: what is measured as values, and the report of them."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from kvjax.bench.cold_start import Startup
from kvjax.bench.machine import sentence
from kvjax.bench.measurements import DecodeRow, LongRow, PrefillRow
from kvjax.tables import Column, Report, Table, counted, human_bytes, human_rate, milliseconds


@dataclasses.dataclass
class Measurements:
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
    peer: str | None = None  # its name and what runs there


def report(found: Measurements) -> Report:
    """Every table there is something for, and what the numbers mean."""
    return Report([*tables(found), footnote(found)], dataclasses.asdict(found))


def tables(found: Measurements) -> list[Table]:
    """Every table there is something for."""
    compared = any(row.speedup_over_peer is not None for row in (*found.decode, *found.prefill))
    peer = [Column("x peer", "speedup_over_peer", "{:.2f}x".format)] if compared else []
    decode = [
        Column("batch", "batch"),
        Column("context", "context"),
        Column("policy", "candidate"),
        Column("prefill tokens/s", "prefill_tokens_per_second", human_rate),
        Column("decode tokens/s", "tokens_per_second", human_rate),
        *peer,
        Column("of limit", "limit_fraction", "{:.0%}".format),
        Column("cache", "cache_bytes", human_bytes),
        Column("live", "live_cache_bytes", human_bytes),
        Column("peak", "peak_bytes", human_bytes),
    ]
    prefill = [
        Column("prompt", "prompt_tokens"),
        Column("policy", "candidate"),
        Column("prefill tokens/s", "tokens_per_second", human_rate),
        *peer,
        Column("peak", "peak_bytes", human_bytes),
    ]
    long = [
        Column("policy", "policy"),
        Column("after", "few"),
        Column("step", "few_seconds", milliseconds),
        Column("after", "many"),
        Column("step", "many_seconds", milliseconds),
        Column("ratio", "ratio", "{:.3f}".format),
        Column("cache", "few_cache_bytes", human_bytes),
        Column("cache", "many_cache_bytes", human_bytes),
    ]
    startup = [
        Column("cold compilation", "cold_compile", "{:.1f} s".format),
        Column("first process, all of it", "cold_total", "{:.1f} s".format),
        Column("second process, start to first text", "second_first_token", "{:.1f} s".format),
    ]
    made = [
        Table(decode, found.decode, "Prefill and decode", labels=3),
        Table(prefill, found.prefill, "Prefill, batch 1", labels=2),
        Table(long, found.long, "A decode step after few and after many generated tokens, batch 1", labels=1),
        Table(startup, [found.startup] if found.startup else [], "Starting"),
    ]
    return [table for table in made if table.rows]


def footnote(found: Measurements) -> str:
    """The sentences that say what the numbers mean and where they come from."""
    said = f"{found.model}, {found.dtype}; {sentence(found.machine)}. Medians of rounds taken in turn. "
    if found.peer:
        said += f"Peer: {found.peer}. "
    if found.bandwidth_readings:
        rate, size = statistics.median(found.bandwidth_readings), found.bandwidth_buffer_bytes
        total = sum(len(row.rounds) for row in found.decode)
        unsteady = total - sum(row.steady_rounds for row in found.decode)
        said += (
            f"Limit: the bytes a step must read ({human_bytes(found.weight_bytes_per_step)} of weights, and the "
            f"cache that is live then) at the bandwidth measured before and after it (reading {human_bytes(size)}; "
            f"median {rate / 1e9:.1f} GB/s); {unsteady} of {counted(total, 'round')}, in which those differ by "
            f"over 15 %, {'does' if unsteady == 1 else 'do'} not count for it where a case has others. "
        )
    return said + "Peak: memory in use while the case ran, beyond what was in use before its cache existed."
