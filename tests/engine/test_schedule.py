"""The schedule without a model: who is read when, with whom, and on times that were given."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.engine.engine_report import RequestMetrics, report_of
from kvjax.engine.schedule import Scheduler
from kvjax.engine.simulate import Arrival, Times, lognormal_trace, simulate
from kvjax.errors import UsageError


@dataclasses.dataclass(eq=False)
class Asked:
    kind: str
    together: int


def asked(kinds: Sequence[str], together: int = 4) -> list[Asked]:
    return [Asked(kind, together if kind == "short" else 1) for kind in kinds]


def test_the_one_that_waited_longest_is_read_next_with_others_of_its_kind():
    scheduler, made = Scheduler(8), asked(["long", "short", "long", "short", "short", "short", "short", "short"])
    for request in made:
        scheduler.add(request)
    groups = [scheduler.next_group() for _ in range(5)]
    found = [[made.index(request) for request in group.requests] for group in groups if group is not None]
    assert found == [[0], [1, 3, 4, 5], [2], [6, 7]] and groups[4] is None
    assert len(groups[3].places) == 4, "two sizes are compiled: one row, or as many as fill the machine"
    slots = [place[1] for group in groups if group for place in group.places if place]
    assert sorted(slots) == list(range(8)) and scheduler.free == 0


def test_every_device_of_the_data_axis_has_places_of_its_own():
    scheduler, made = Scheduler(8, shards=2), asked(["short"] * 7, together=2)
    for request in made:
        scheduler.add(request)
    for wanted in (4, 3):
        group = scheduler.next_group()
        assert group is not None and len(group.requests) == wanted and len(group.places) == 4
        for i, place in enumerate(group.places):
            assert place is None or place[1] // 4 == i // 2, "a row is read on the device that has its slot"
    scheduler.release(6)
    scheduler.add(made[0])
    group = scheduler.next_group()
    assert group is not None and [place and place[1] for place in group.places] in ([None, 6], [None, 7])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 3), st.randoms())
def test_nobody_starves_and_no_slot_is_given_twice(kinds, slots, shards, draw):
    """Whatever comes and leaves: all are read, none is overtaken by one of its own kind, and the head goes first."""
    scheduler = Scheduler(slots * shards, shards)
    made = [SimpleNamespace(kind=kind, together=1 + kind % 3, number=i) for i, kind in enumerate(kinds)]
    coming, running, read = list(made), [], []
    while coming or scheduler.waiting or running:
        if coming and draw.random() < 0.6:
            scheduler.add(coming.pop(0))
        first = scheduler._waiting[0] if scheduler.waiting else None
        group = scheduler.next_group()
        if group is not None:
            assert group.requests[0] is first or first in group.requests
            assert len(group.places) in {shards, shards * group.requests[0].together}
            running += [place for place in group.places if place is not None]
            read += group.requests
        assert len({slot for _, slot in running}) == len(running)
        if running and draw.random() < 0.5:
            scheduler.release(running.pop(draw.randrange(len(running)))[1])
    assert sorted(request.number for request in read) == list(range(len(made)))
    for kind in set(kinds):
        numbers = [request.number for request in read if request.kind == kind]
        assert numbers == sorted(numbers)


def test_a_simulation_keeps_its_slots_busy():
    """Against the sum of what the machine must do: steps of full slots, and every prompt once."""
    trace = lognormal_trace(2000, seed=3)
    times = Times(step_seconds=0.02, read_seconds=1e-4, stop_seconds=0.0)
    found = simulate(trace, times, slots=16)
    tokens = sum(arrival.new_tokens for arrival in trace)
    ideal = 0.02 * (tokens - len(trace)) / 16 + 1e-4 * sum(arrival.prompt_tokens for arrival in trace)
    assert found.requests == 2000 and found.generated_tokens == tokens
    assert 0.85 < ideal / found.seconds <= 1.0 and found.decoding > 0.7
    again = simulate(trace, times, slots=16)
    assert again == found, "the same schedule for the same times"


def test_long_prompts_keep_running_rows_waiting_no_longer_than_they_may():
    trace = [Arrival(0.0, 50, 400)] + [Arrival(0.5, 8000, 5)] * 3
    times = Times(step_seconds=0.01, read_seconds=1e-3, stop_seconds=0.0, layers=32)
    for pause in (0.3, 1.0):
        found = simulate(trace, times, slots=4, max_pause=pause)
        first = next(one for one in found.served if one.prompt_tokens == 50)
        chunk = max(seconds for seconds, _ in first.gaps)
        assert chunk < pause + 8.0 / 32 + 0.5 + 1e-6, "the pause, the layer that was begun, and the chunk itself"


def test_a_long_prompt_is_read_whoever_overtakes_it():
    """A steady flow of short ones, and no pause at all: the long one goes on by a layer an iteration."""
    trace = [Arrival(0.0, 5000, 5)] + [Arrival(0.1 * i, 30, 20) for i in range(600)]
    times = Times(step_seconds=0.01, read_seconds=5e-4, stop_seconds=0.0, layers=32)
    for pause in (0.0, 0.5):
        found = simulate(trace, times, slots=16, max_pause=pause)
        first = next(one for one in found.served if one.prompt_tokens == 5000)
        assert first.first_token is not None and first.first_token < 32 * (2.5 / 32 + 0.5 + 0.1), pause


def test_a_prompt_is_read_in_every_turn_however_short_the_pause():
    """A free slot is filled while another row runs, with no pause at all too."""
    trace = [Arrival(0.0, 50, 400), Arrival(0.5, 50, 5)]
    times = Times(step_seconds=0.01, read_seconds=1e-4, stop_seconds=0.0, layers=32)
    for pause in (0.0, 1e-9, 0.5):
        found = simulate(trace, times, slots=2, max_pause=pause)
        late = next(one for one in found.served if one.generated_tokens == 5)
        assert late.first_token is not None and late.first_token < 2.0, pause


@pytest.mark.parametrize("tokens", [256, 257])
def test_devices_read_their_own_prompts_at_once(tokens):
    """16 prompts at 0.1 seconds each, on one device and on four."""
    trace = [Arrival(0.0, tokens, 1)] * 16
    times = Times(step_seconds=0.01, read_seconds=0.1 / tokens, stop_seconds=0.0)
    took = [simulate(trace, times, slots=16, shards=shards).seconds for shards in (1, 4)]
    assert took == pytest.approx([1.6, 0.4])


def test_requests_come_when_they_come():
    found = simulate(lognormal_trace(200, per_second=1.0, seed=1), Times(0.001, 1e-5), slots=8)
    assert found.seconds > 100 and max(found.queue_time) < 1.0
    assert np.mean([one.arrived for one in found.served]) > 50


def test_a_report_of_what_has_not_ended():
    served = [
        RequestMetrics(0, 0.0, 1.0, 2.0, None, 10, 5, ((1.0, 5),)),
        RequestMetrics(None, 3.0, None, None, None, 7, 0),
    ]
    found = report_of(served, 2, 0.0, 4.0)
    assert (found.requests, found.generated_tokens, found.prompt_tokens) == (0, 5, 10)
    assert found.decoding == pytest.approx(2 / 8) and found.prefilling == pytest.approx(1 / 8)
    assert found.queue_time == (1.0, 1.0, 1.0) and found.inter_token_latency == (0.2, 0.2, 0.2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Times(-1.0, 1.0),
        lambda: Times(1.0, float("nan")),
        lambda: simulate([], Times(1.0, 1.0), slots=0),
        lambda: lognormal_trace(0),
        lambda: lognormal_trace(5, new_median=10, new_mean=5),
        lambda: lognormal_trace(5, new_mean=700, new_most=600),
        lambda: lognormal_trace(5, prompt_median=10, prompt_least=20),
        lambda: lognormal_trace(5, prompt_median=700, prompt_most=600),
    ],
)
def test_numbers_that_make_no_sense(make):
    with pytest.raises(UsageError):
        make()
