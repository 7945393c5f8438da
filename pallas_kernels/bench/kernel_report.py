"""Report of a kernel benchmark: results, device and versions, as JSON or as a Markdown table."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
from collections.abc import Callable
from typing import Any, Self

import jax
import jaxlib.version
import numpy as np

from pallas_kernels.bench.decode_inputs import Sizes


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation.

    Attributes:
      error: largest absolute difference of an output from the float32 reference.
      microseconds: of one step, the median; ``least`` and ``most`` of the rounds.
      gigabytes: 1e9 bytes of live keys and values per second.
      bandwidth_fraction: live bytes per second over the bandwidth of a copy.
      refused: why it did not run.
    """

    name: str
    error: float | None = None
    microseconds: float | None = None
    least: float | None = None
    most: float | None = None
    gigabytes: float | None = None
    bandwidth_fraction: float | None = None
    refused: str | None = None


#: Headings of the table, and the text of a row that was measured under each.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "implementation": lambda row: row.name,
    "max error": lambda row: f"{row.error:.1e}",
    "µs a step": lambda row: f"{row.microseconds:,.1f}",
    "rounds": lambda row: f"{row.least:,.1f} to {row.most:,.1f}",
    "GB/s live": lambda row: f"{row.gigabytes:,.0f}",
    "of a copy": lambda row: f"{row.bandwidth_fraction:.0%}",
}


@dataclasses.dataclass(frozen=True)
class Report:
    """Results of one problem on one machine; ``bandwidth``: bytes per second that a copy reads and writes."""

    sizes: Sizes
    rows: tuple[Row, ...]
    bandwidth: float
    page_size: int
    longest: int
    device: str
    versions: dict[str, str]
    date: str

    @classmethod
    def of(cls, sizes: Sizes, rows: tuple[Row, ...], bandwidth: float) -> Self:
        """Report of these rows, with this machine's device, versions and date."""
        versions = {
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "runtime": " ".join(jax.devices()[0].client.platform_version.split()),
        }
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        longest = int(sizes.lengths().max())
        return cls(sizes, rows, bandwidth, sizes.page, longest, jax.devices()[0].device_kind, versions, date)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    def json(self) -> str:
        """One JSON object."""
        return json.dumps(self.as_dict(), indent=2)

    @property
    def title(self) -> str:
        """The operation measured, and on what."""
        s = self.sizes
        return (
            f"{self.device}: batch {s.batch}, {s.heads} KV heads, {s.group} queries each, D = {s.head_dim}, "
            f"{s.dtype}, mean length {s.mean:,}, longest {self.longest:,}, pages of {self.page_size}"
        )

    @property
    def facts(self) -> str:
        """Notes by which the table is read."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items() if version)
        return (
            f"{self.sizes.live_bytes / 1e6:,.1f} MB of live keys and values; a copy moves "
            f"{self.bandwidth / 1e9:,.0f} GB/s. {versions}; {self.date}."
        )

    def markdown(self) -> str:
        """A table under a line that says what was measured, made with nothing but JAX and NumPy installed."""
        numbers = len(COLUMNS) - 1
        head = [f"### {self.title}", "", self.facts, "", f"| {' | '.join(COLUMNS)} |", "|---|" + "--:|" * numbers]
        lines = [
            f"| {' | '.join(text(row) for text in COLUMNS.values())} |"
            if row.refused is None
            else f"| {row.name} | {row.refused} |" + " |" * (numbers - 1)
            for row in self.rows
        ]
        return "\n".join([*head, *lines]) + "\n"
