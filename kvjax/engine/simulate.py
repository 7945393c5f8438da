"""An engine's schedule on times that were given or measured: the same scheduler and loop, and no model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from kvjax.cache.buckets import SHORT, prompt_bucket
from kvjax.checks import number, whole_number
from kvjax.engine.engine_report import EngineReport, RequestMetrics, report_of
from kvjax.engine.engine_sizes import bucket_for
from kvjax.engine.loop import Loop
from kvjax.engine.schedule import Group, Scheduler


@dataclasses.dataclass(frozen=True)
class Times:
    """The times that a machine takes, as assumed.

    Attributes:
      step_seconds: one decode step of all slots.
      read_seconds: reading one token of a prompt, on each device of the data axis.
      stop_seconds: the host's work between two programs.
      layers: parts that a long prompt is read in.
    """

    step_seconds: float
    read_seconds: float
    stop_seconds: float = 0.001
    layers: int = 32

    def __post_init__(self) -> None:
        for name in ("step_seconds", "read_seconds", "stop_seconds"):
            number(name, getattr(self, name), 0.0)
        whole_number("layers", self.layers, 1)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of a trace: when it comes, its prompt's tokens, and those it will have generated when it ends."""

    seconds: float
    prompt_tokens: int
    new_tokens: int


def lognormal_trace(
    requests: int,
    *,
    prompt_median: float = 80,
    prompt_least: float = 20,
    prompt_most: float = 600,
    new_median: float = 60,
    new_mean: float = 100,
    new_most: float = 600,
    per_second: float | None = None,
    seed: int = 0,
) -> list[Arrival]:
    """Requests whose prompts and answers have log-normal lengths; all come at once, or ``per_second`` at random times.

    The answers' spread follows from their mean over their median; the prompts' is that of the answers.
    """
    whole_number("requests", requests, 1)
    number("prompt_median", prompt_median, prompt_least, prompt_most)
    number("new_mean", new_mean, new_median, new_most)
    draw = np.random.default_rng(seed)
    sigma = float(np.sqrt(2 * np.log(new_mean / new_median)))
    prompts = np.clip(np.round(prompt_median * np.exp(sigma * draw.normal(size=requests))), prompt_least, prompt_most)
    answers = np.clip(np.round(new_median * np.exp(sigma * draw.normal(size=requests))), 1, new_most)
    when = np.zeros(requests) if per_second is None else np.cumsum(draw.exponential(1 / per_second, size=requests))
    return [Arrival(float(t), int(p), int(n)) for t, p, n in zip(when, prompts, answers, strict=True)]


@dataclasses.dataclass(eq=False)
class _Request:
    """A request of a trace on its way."""

    arrival: Arrival
    kind: int
    together: int
    slot: int | None = None
    made: int = 0
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    last: float = 0.0
    gaps: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    def metrics(self) -> RequestMetrics:
        at = self.arrival
        times = at.seconds, self.started, self.first_token, self.finished
        return RequestMetrics(self.slot, *times, at.prompt_tokens, self.made, tuple(self.gaps), "length")


class _Machine:
    """The worker of a simulation, whose work takes the clock forward and does nothing."""

    def __init__(self, times: Times, slots: int, shards: int):
        self.now, self._times, self._shards, self._ended = 0.0, times, shards, []
        self._rows: list[_Request | None] = [None] * slots

    def clock(self) -> float:
        return self.now

    def read(self, group: Group[_Request]) -> Iterator[None]:
        for request in group.requests:
            request.started = self.now
        longest = max(request.arrival.prompt_tokens for request in group.requests)
        each = len(group.places) // self._shards
        devices = (group.places[i : i + each] for i in range(0, len(group.places), each))
        fullest = max(sum(place is not None for place in own) for own in devices)
        seconds = self._times.stop_seconds + self._times.read_seconds * longest * fullest
        parts = 1 if longest <= SHORT else self._times.layers
        for _ in range(parts):
            self.now += seconds / parts
            yield
        for place in group.places:
            if place is not None:
                request, slot = place
                request.slot, request.first_token, request.last, request.made = slot, self.now, self.now, 1
                self._rows[slot] = request
                self._end(request)

    def decode(self, steps: int, least_running: int) -> int:
        running = [request for request in self._rows if request is not None]
        left = sorted(request.arrival.new_tokens - request.made for request in running)
        # The step with which too few would be left: the (count - least)-th row ends.
        steps = min(steps, left[len(left) - least_running])
        self.now += self._times.stop_seconds + self._times.step_seconds * steps
        for request in running:
            made = min(steps, request.arrival.new_tokens - request.made)
            request.made += made
            request.gaps.append((self.now - request.last, made))
            request.last = self.now
            self._end(request)
        return steps

    def _end(self, request: _Request) -> None:
        if request.made >= request.arrival.new_tokens and request.slot is not None:
            request.finished, self._rows[request.slot] = self.now, None
            self._ended.append(request.slot)

    def take_ended(self) -> list[int]:
        found, self._ended = self._ended, []
        return found


def simulate(
    trace: Sequence[Arrival],
    times: Times,
    *,
    slots: int,
    shards: int = 1,
    together: int = 4,
    max_pause: float = 0.5,
    chunk_seconds: float = 0.5,
) -> EngineReport:
    """The report of an engine that serves a trace on a machine of these times.

    Args:
      slots: of the engine, over all devices. shards: devices of the data axis.
      together: prompts of up to 256 tokens that each of them reads at once.
    """
    whole_number("slots", slots, 1)
    whole_number("shards", shards, 1)
    whole_number("together", together, 1)
    slots = -(-slots // shards) * shards
    most = max((arrival.prompt_tokens for arrival in trace), default=1)
    machine = _Machine(times, slots, shards)
    loop = Loop(
        Scheduler[_Request](slots, shards), machine, machine.clock, max_pause=max_pause, chunk_seconds=chunk_seconds
    )
    requests = []
    for arrival in sorted(trace, key=lambda arrival: arrival.seconds):
        bucket = bucket_for(arrival.prompt_tokens, prompt_bucket(most))
        requests.append(_Request(arrival, bucket, min(together, slots // shards) if bucket <= SHORT else 1))
    coming = list(reversed(requests))
    while coming or not loop.idle:
        if loop.idle:
            machine.now = max(machine.now, coming[-1].arrival.seconds)
        while coming and coming[-1].arrival.seconds <= machine.now:
            loop.scheduler.add(coming.pop())
        loop.iterate()
    return report_of([request.metrics() for request in requests], slots, 0.0, machine.now)
