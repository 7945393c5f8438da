"""What was measured, on what, with which versions: as JSON or as a table."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
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
      gigabytes: 1e9 bytes a second of live keys and values. share: of the bandwidth of a copy.
      refused: why it did not run.
    """

    name: str
    error: float | None = None
    microseconds: float | None = None
    least: float | None = None
    most: float | None = None
    gigabytes: float | None = None
    share: float | None = None
    refused: str | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """One problem on one machine; ``bandwidth`` is a copy's bytes a second, read and written."""

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
        """With this machine's name and versions, and the date."""
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

    def markdown(self) -> str:
        """A table under a line that says what was measured."""
        s = self.sizes
        live = f"{s.live_bytes / 1e6:,.1f} MB of live keys and values"
        head = [
            f"### {self.device}: batch {s.batch}, {s.heads} KV heads, {s.group} queries each, D = {s.head_dim}, "
            f"{s.dtype}, mean length {s.mean:,}, longest {self.longest:,}, pages of {self.page_size}",
            "",
            f"{live}; a copy moves {self.bandwidth / 1e9:,.0f} GB/s. "
            + ", ".join(f"{name} {version}" for name, version in self.versions.items() if version)
            + f"; {self.date}.",
            "",
            "| implementation | max error | µs a step | rounds | GB/s live | of a copy |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        return "\n".join([*head, *(_line(row) for row in self.rows)]) + "\n"


def _line(row: Row) -> str:
    if row.refused is not None:
        return f"| {row.name} | {row.refused} | | | | |"
    return (
        f"| {row.name} | {row.error:.1e} | {row.microseconds:,.1f} | {row.least:,.1f} to {row.most:,.1f} "
        f"| {row.gigabytes:,.0f} | {row.share:.0%} |"
    )
