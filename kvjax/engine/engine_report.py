"""Statistics of an engine: throughput, slot utilisation, and waiting times of requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.tables import Column, Report, Table, human_rate

#: Percentiles that a report shows.
_PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """A request that came, and how far it got.

    Attributes:
      slot: the one it had, None of one that had none yet.
      arrived, started, first_token, finished: when it came, its prefill started, its first token came and it ended;
        seconds of a clock.
      prompt_tokens, generated_tokens: of it. gaps: (seconds since the tokens before, tokens) of each delivery.
      reason: why it ended.
    """

    slot: int | None
    arrived: float
    started: float | None
    first_token: float | None
    finished: float | None
    prompt_tokens: int
    generated_tokens: int
    gaps: tuple[tuple[float, int], ...] = ()
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over requests.

    Attributes:
      requests: that have ended. prompt_tokens: that were read. generated_tokens: of all.
      decoding, prefilling: seconds of slots in which they decoded and were read.
    """

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    decoding: float = 0.0
    prefilling: float = 0.0

    def plus(self, one: RequestMetrics, now: float) -> Totals:
        """The same with one more request, as it is at a time of its clock."""
        first, end = (now if each is None else each for each in (one.first_token, one.finished))
        held = one.slot is not None and one.started is not None
        return Totals(
            self.requests + (one.finished is not None),
            self.prompt_tokens + (0 if one.first_token is None else one.prompt_tokens),
            self.generated_tokens + one.generated_tokens,
            self.decoding + (end - first if held else 0.0),
            self.prefilling + (first - one.started if held and one.started is not None else 0.0),
        )


@dataclasses.dataclass(frozen=True)
class EngineReport:
    """The numbers of an engine, seconds throughout.

    Attributes:
      slots: of the engine. requests: that have ended. served: the last 10,000 of them, and those that have not.
      seconds: from ``began`` until it was asked.
      prompt_tokens, generated_tokens: of all requests so far.
      decoding, prefilling: the parts of the slots' time in which their requests decoded, and were read.
      queue_time, time_to_first_token, inter_token_latency: percentiles 50, 90 and 99, of those ``served``.
    """

    slots: int
    requests: int
    began: float
    seconds: float
    prompt_tokens: int
    generated_tokens: int
    decoding: float
    prefilling: float
    queue_time: tuple[float, ...]
    time_to_first_token: tuple[float, ...]
    inter_token_latency: tuple[float, ...]
    served: tuple[RequestMetrics, ...] = dataclasses.field(repr=False)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over all seconds, those of reading too."""
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        return self.report().markdown()

    def print(self) -> None:
        """The numbers as tables, on standard output."""
        self.report().print()

    def report(self) -> Report:
        """The numbers as tables."""
        facts = [
            ("requests", f"{self.requests:,}"),
            ("slots", f"{self.slots}"),
            ("seconds", f"{self.seconds:,.1f}"),
            ("prompt tokens", f"{self.prompt_tokens:,}"),
            ("generated tokens", f"{self.generated_tokens:,}"),
            ("generated tokens/s", human_rate(self.tokens_per_second)),
            ("slots decoding", f"{self.decoding:.1%}"),
            ("slots in prefill", f"{self.prefilling:.1%}"),
        ]
        named = [
            ("queue time", self.queue_time),
            ("time to first token", self.time_to_first_token),
            ("inter-token latency", self.inter_token_latency),
        ]
        numbers = Table([Column("engine", _first), Column("", _second, right=True)], facts)
        columns = [Column("seconds of a request", _first)]
        for i, share in enumerate(_PERCENTILES):
            columns.append(Column(f"p{share}", lambda row, i=i: row[1][i], "{:.3f}".format, right=True))
        return Report([numbers, Table(columns, named)], self.data())

    def data(self) -> dict[str, Any]:
        """JSON-ready numbers, those of single requests left out."""
        numbers = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "served"
        }
        return numbers | {"tokens_per_second": self.tokens_per_second}


def _first(row: Sequence[Any]) -> Any:
    return row[0]


def _second(row: Sequence[Any]) -> Any:
    return row[1]


def report_of(
    served: Sequence[RequestMetrics], slots: int, began: float, now: float, before: Totals | None = None
) -> EngineReport:
    """The report of requests that were served from ``began`` until ``now``; ``before``: sums of earlier ones."""
    sums = before or Totals()
    for one in served:
        sums = sums.plus(one, now)
    total = max((now - began) * slots, 1e-9)
    gaps = [(seconds / tokens, tokens) for one in served for seconds, tokens in one.gaps]
    between = np.repeat([gap for gap, _ in gaps], [count for _, count in gaps]) if gaps else np.zeros(0)
    return EngineReport(
        slots=slots,
        requests=sums.requests,
        began=began,
        seconds=now - began,
        prompt_tokens=sums.prompt_tokens,
        generated_tokens=sums.generated_tokens,
        decoding=sums.decoding / total,
        prefilling=sums.prefilling / total,
        queue_time=_percentiles([one.started - one.arrived for one in served if one.started is not None]),
        time_to_first_token=_percentiles(
            [one.first_token - one.arrived for one in served if one.first_token is not None]
        ),
        inter_token_latency=_percentiles(between),
        served=tuple(served),
    )


def _percentiles(values: Any) -> tuple[float, ...]:
    found = np.asarray(values, float)
    return tuple(float(x) for x in np.percentile(found, _PERCENTILES)) if found.size else (0.0,) * len(_PERCENTILES)
