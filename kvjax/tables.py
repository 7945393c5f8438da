"""Reports: tables for a terminal or as Markdown, the same numbers as JSON, and numbers written for people."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
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


def counted(count: int, one: str, many: str | None = None) -> str:
    """A number of things, such as "1 question" and "2,000 questions"; ``many`` is a plural that does not end in s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def measured_on(machine: Mapping[str, Any]) -> str:
    """Processor, versions and date of a measurement, for a footnote; ``kvjax.bench.machine.describe`` gives them."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return f"{machine['processor']}, {machine['cores']} cores; {versions}; {machine['date'][:10]}"


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
      name: its heading.
      value: the row's field or key that it shows, or a function of the row.
      show: the text of a value; ``missing`` is that of None.
      right: whether cells are set to the right, as numbers under each other are.
    """

    name: str
    value: str | Callable[[Any], Any]
    show: Callable[[Any], str] = str
    missing: str = ""
    right: bool = False

    def cell(self, row: Any) -> str:
        """The text of a row."""
        if isinstance(self.value, str):
            value = row[self.value] if isinstance(row, Mapping) else getattr(row, self.value)
        else:
            value = self.value(row)
        return self.missing if value is None else self.show(value)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of any kind, and the columns that are made of them.

    Attributes:
      note: text that a row shows instead of its numbers, or None.
      labels: leading columns that name a row: such a row still shows them, and each piece of a table that is too wide.
    """

    columns: Sequence[Column]
    rows: Sequence[Any]
    title: str = ""
    note: Callable[[Any], str | None] = lambda _: None
    labels: int = 0

    @property
    def header(self) -> list[str]:
        """Headings."""
        return [column.name for column in self.columns]

    @property
    def cells(self) -> list[list[str]]:
        """Texts under the headings, a list a row."""
        return [self._row(row) for row in self.rows]

    def _row(self, row: Any) -> list[str]:
        if (note := self.note(row)) is None:
            return [column.cell(row) for column in self.columns]
        shown = [*(column.cell(row) for column in self.columns[: self.labels]), note]
        return shown + [""] * (len(self.columns) - len(shown))

    def markdown(self) -> str:
        """The table as Markdown, its title in bold above it."""
        marks = ["--:" if column.right else "---" for column in self.columns]
        lines = [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
            for line in (self.header, marks, *self.cells)
        ]
        return "\n".join([f"**{self.title}**", "", *lines] if self.title else lines)

    def text(self) -> str:
        """Cells in padded columns, without headings and lines."""
        cells = self.cells
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if column.right else cell.ljust(width)
                for column, cell, width in zip(self.columns, line, widths, strict=True)
            ).rstrip()
            for line in cells
        )


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture's file, which Markdown shows and a terminal does not."""

    caption: str
    path: str

    def markdown(self) -> str:
        """The link that shows it."""
        return f"![{self.caption}]({self.path})"


@dataclasses.dataclass(frozen=True)
class Heading:
    """The heading of the parts that follow."""

    text: str

    def markdown(self) -> str:
        """A heading of the second level."""
        return f"## {self.text}"


@dataclasses.dataclass(frozen=True)
class Report:
    """Tables with the sentences that explain them, for a terminal or as Markdown, and the numbers behind them as JSON.

    Attributes:
      parts: headings, tables, pictures and paragraphs in order.
      data: JSON-ready values.
    """

    parts: Sequence[Heading | Table | Picture | str]
    data: Any = None

    def markdown(self) -> str:
        """The whole report as Markdown, ending with a newline."""
        return "\n\n".join(part if isinstance(part, str) else part.markdown() for part in self.parts) + "\n"

    def json(self) -> str:
        """The numbers as indented JSON, ending with a newline."""
        return json.dumps(self.data, indent=1) + "\n"

    def print(self, *, markdown: bool = False, width: int | None = None) -> None:
        """The report on standard output; ``width`` columns wide where neither a terminal nor COLUMNS says."""
        if markdown:
            print(self.markdown(), end="")
            return
        from rich.console import Console

        terminal = sys.stdout.isatty()
        console = Console(highlight=False, width=_width(terminal, width))
        for part in self.parts:
            if isinstance(part, Heading | str):
                part = part if isinstance(part, str) else part.text
                console.print(part, markup=False, emoji=False, soft_wrap=not terminal)
            elif isinstance(part, Table):
                for piece in fitted(part, console.width):
                    console.print(_drawn(piece, console.width))


#: Fewer columns than these hold no table; some environments say 0.
_LEAST_WIDTH = 20
#: Columns of what is neither a terminal nor said by anybody.
_USUAL_WIDTH = 80


def _width(terminal: bool, asked: int | None) -> int:
    """Columns of a table: COLUMNS says them, or a terminal, or who prints it."""
    said = os.environ.get("COLUMNS", "")
    if said.isascii() and said.isdigit() and int(said[:9]) >= _LEAST_WIDTH:
        return int(said[:9])
    if not terminal:
        return asked or _USUAL_WIDTH
    try:
        return max(os.get_terminal_size(sys.stdout.fileno()).columns, _LEAST_WIDTH)
    except (OSError, ValueError):
        return _USUAL_WIDTH


#: Columns of text may become so narrow, unless a word is longer; what lines and spaces take of each column.
_NARROW, _LINES = 20, 3


def fitted(table: Table, width: int) -> list[Table]:
    """The table in pieces of at most ``width`` columns of text, each with the leading columns that label its rows."""
    needed = [least + _LINES for least, _ in _widths(table)]
    if 1 + sum(needed) <= width:
        return [table]
    labels = table.labels or 1
    while labels > 1 and 1 + sum(needed[:labels]) + max(needed[labels:]) > width:
        labels -= 1  # what labels a row must leave room for what it labels
    pieces: list[list[int]] = [[]]
    for place in range(labels, len(needed)):
        if pieces[-1] and 1 + sum(needed[:labels]) + sum(needed[i] for i in [*pieces[-1], place]) > width:
            pieces.append([])
        pieces[-1].append(place)
    titles = [table.title, *[f"{table.title}, continued" if table.title else ""] * (len(pieces) - 1)]
    return [
        dataclasses.replace(
            table, columns=[table.columns[i] for i in [*range(labels), *piece]], title=title, labels=labels
        )
        for piece, title in zip(pieces, titles, strict=True)
    ]


def _widths(table: Table) -> list[tuple[int, int]]:
    """Columns of text that each column needs, so that no word and no number is broken, and those that it would take."""
    cells, found = table.cells, []
    notes = [table.note(row) is not None for row in table.rows]
    for place, column in enumerate(table.columns):
        noted = [line[place] for line, note in zip(cells, notes, strict=True) if note and place >= table.labels]
        texts = [line[place] for line, note in zip(cells, notes, strict=True) if not note or place < table.labels]
        lines = [part for text in texts for part in text.split("\n")]
        longest = max(map(len, lines), default=0)
        word = max((len(word) for text in (column.name, *lines, *noted) for word in text.split()), default=0)
        least = max(word, longest if column.right else min(longest, _NARROW))
        found.append((least, max(least, longest, len(column.name), *map(len, noted))))
    return found


def _drawn(table: Table, width: int) -> Any:
    """The table as rich draws it."""
    from rich.table import Table as RichTable
    from rich.text import Text

    widths = _widths(table)
    spare = width - 1 - sum(least + _LINES for least, _ in widths)
    shares = {}
    for place, (least, wanted) in sorted(enumerate(widths), key=lambda item: item[1][1] - item[1][0]):
        more = max(min(wanted - least, spare), 0)
        shares[place], spare = least + more, spare - more
    shown = RichTable(title=table.title or None, title_justify="left")
    for place, column in enumerate(table.columns):
        right = "right" if column.right else "left"
        shown.add_column(Text(column.name), overflow="fold", justify=right, width=shares[place])
    for cells in table.cells:
        shown.add_row(*map(Text, cells))
    return shown


def print_text(text: str) -> None:
    """Text on standard output; on a terminal, lines that are too long go on indented below."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(
            part
            for line in text.splitlines()
            for part in textwrap.wrap(line, width, subsequent_indent=" " * 6, drop_whitespace=False) or [""]
        )
    print(text)


def milliseconds(seconds: float) -> str:
    """Seconds in milliseconds with two decimals."""
    return f"{1e3 * seconds:.2f} ms"


def _retained(stats: Stats) -> str:
    windows = stats.windows or (None,) * len(stats.retained)
    chosen = [layer for layer, window in zip(stats.retained, windows, strict=True) if window is None]
    kept = [count for layer in chosen for count in layer]
    if not kept:
        return "-"
    low, high = min(kept), max(kept)
    span = f"{low}" if low == high else f"{low} to {high}"
    return f"{span} of {stats.seen} tokens per layer and head"


def windows_text(windows: Sequence[int | None]) -> str:
    """One line about a model's sliding-window layers."""
    sizes = sorted({window for window in windows if window is not None})
    count = sum(window is not None for window in windows)
    return f"{count} of {len(windows)} layers keep their last {' or '.join(f'{size:,}' for size in sizes)} tokens"


def stats_rows(output: Output) -> list[tuple[str, str]]:
    """Name and value of each line of the stats table."""
    stats = output.stats
    full = stats.full_cache_bytes  # none where a request was called off before it was read
    part = f" ({stats.live_cache_bytes / full:.0%} of a full cache)" if full else ""
    rows = [
        ("prompt", f"{stats.prompt_tokens} tokens"),
        ("generated", f"{stats.generated_tokens} tokens"),
        ("prefill", f"{stats.prompt_seconds:.2f} s, {human_rate(stats.prompt_tokens_per_second)} tokens/s, all rows"),
        ("decode", f"{stats.decode_seconds:.2f} s, {human_rate(stats.decode_tokens_per_second)} tokens/s, all rows"),
        ("time to first token", f"{stats.time_to_first_token:.2f} s"),
        ("compiling", f"{stats.compile_seconds:.2f} s"),
        ("cache allocated", human_bytes(stats.cache_bytes)),
        ("cache live", f"{human_bytes(stats.live_cache_bytes)}{part}"),
        ("cache peak", f"{human_bytes(stats.device_peak_bytes)} on each device, for the whole batch"),
        ("full cache", human_bytes(stats.full_cache_bytes)),
        *([("shared", f"{human_bytes(stats.shared_cache_bytes)} with all rows")] if stats.shared_cache_bytes else []),
        *([("policy", stats.choice)] if stats.choice else []),
        ("retained", _retained(stats)),
        *([("sliding windows", windows_text(stats.windows))] if stats.windows else []),
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
    scored = [value for value in output.prompt_logprobs or () if value is not None]
    if scored:
        rows.append(("mean prompt logprob", f"{math.fsum(scored) / len(scored):.4f}, of {len(scored)} tokens"))
    return rows


def print_stats(output: Output) -> None:
    """The stats table on standard error."""
    columns = [Column("", operator.itemgetter(place)) for place in range(2)]
    print(f"\n{Table(columns, stats_rows(output)).text()}", file=sys.stderr)


def as_dict(output: Output) -> dict[str, Any]:
    """An output as JSON-ready values; the cache itself is left out."""
    return {
        "text": output.text,
        "tokens": [int(token) for token in output.tokens],
        "finish_reason": output.finish_reason,
        "logprobs": None if output.logprobs is None else [float(value) for value in output.logprobs],
        "prompt_logprobs": None if output.prompt_logprobs is None else list(output.prompt_logprobs),
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
