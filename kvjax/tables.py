"""Tables for people on standard error, and the same facts as JSON on standard output."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax import Output, Stats


def human_bytes(count: float) -> str:
    """Bytes with a decimal unit and three digits, such as 1.51 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def human_rate(rate: float) -> str:
    """Tokens per second with three digits; a dash when nothing was timed."""
    return "-" if not math.isfinite(rate) or rate <= 0 else f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _retained(stats: Stats) -> str:
    kept = [count for layer in stats.retained for count in layer]
    if not kept:
        return "-"
    low, high = min(kept), max(kept)
    span = f"{low}" if low == high else f"{low} to {high}"
    return f"{span} of {stats.seen} tokens per layer and head"


def stats_rows(output: Output) -> list[tuple[str, str]]:
    """Name and value of each line of the stats table."""
    stats = output.stats
    share = stats.live_cache_bytes / stats.full_cache_bytes if stats.full_cache_bytes else math.nan
    rows = [
        ("prompt", f"{stats.prompt_tokens} tokens in {stats.prompt_seconds:.2f} s"),
        ("", f"{human_rate(stats.prompt_tokens_per_second)} tokens/s"),
        ("generated", f"{stats.generated_tokens} tokens in {stats.decode_seconds:.2f} s"),
        ("", f"{human_rate(stats.decode_tokens_per_second)} tokens/s"),
        ("time to first token", f"{stats.time_to_first_token:.2f} s"),
        ("compiling", f"{stats.compile_seconds:.2f} s"),
        ("cache allocated", human_bytes(stats.cache_bytes)),
        ("cache live", f"{human_bytes(stats.live_cache_bytes)} ({share:.0%} of a full cache)"),
        ("full cache", human_bytes(stats.full_cache_bytes)),
        ("retained", _retained(stats)),
        ("ended by", output.finish_reason),
    ]
    if stats.rounds is not None:
        found = stats.rounds
        rows += [
            ("rounds seen", f"{len(found.selected)} of {found.rounds}; {found.tokens_used} tokens in upper layers"),
            ("from the host", f"{human_bytes(found.moved_bytes)} for this question"),
            ("on the host", human_bytes(found.host_bytes)),
        ]
    if output.logprobs:
        rows.append(("mean logprob", f"{math.fsum(output.logprobs) / len(output.logprobs):.4f}"))
    return rows


def print_stats(output: Output) -> None:
    """The stats table on standard error."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in stats_rows(output):
        table.add_row(name, value)
    console = Console(stderr=True, highlight=False)
    console.print()
    console.print(table)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None) -> None:
    """A table on standard output; ``width`` columns of text where it is no terminal, which has its own."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else width).print(table)


def as_dict(output: Output) -> dict[str, Any]:
    """An output as JSON-ready values; the cache itself is left out."""
    return {
        "text": output.text,
        "tokens": [int(token) for token in output.tokens],
        "finish_reason": output.finish_reason,
        "logprobs": None if output.logprobs is None else [float(value) for value in output.logprobs],
        "stats": dataclasses.asdict(output.stats),
    }


def print_json(value: Any) -> None:
    """One JSON value on one line of standard output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def write_text(text: str) -> None:
    """Streamed text on standard output, visible at once; what the terminal cannot show is replaced."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
