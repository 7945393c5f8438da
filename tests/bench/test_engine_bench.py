"""The bench of the engine: every answer has its tokens, and the ideal is of a step timed before and after them."""

from __future__ import annotations

import pytest

from kvjax.bench import engine
from kvjax.documents import parse_json
from kvjax.engine.core import EngineCore
from kvjax.engine.simulate import Arrival
from kvjax.errors import UsageError
from kvjax.policies import Full

TRACE = [Arrival(0.0, tokens, new) for tokens, new in ((5, 4), (9, 12), (3, 2), (20, 7), (6, 1))]
TOKENS = sum(arrival.new_tokens for arrival in TRACE)


def test_the_ideal_is_of_the_mean_step_before_and_after_the_trace(tiny_model, monkeypatch):
    steps = iter((1.0, 3.0))
    monkeypatch.setattr(EngineCore, "step_seconds", lambda self: next(steps))
    said: list[str] = []
    rows, found = engine.measure(tiny_model, Full(), TRACE, slots=2, say=said.append)
    assert [row.name for row in rows] == ["static batches", "engine"] and {row.tokens for row in rows} == {TOKENS}
    # The rest is what reading the prompts takes, on a toy next to nothing.
    steps_alone = 2.0 * (TOKENS - len(TRACE)) / 2
    assert all(steps_alone < row.ideal_seconds < steps_alone + 1 for row in rows)
    assert rows[0].of_ideal == rows[0].ideal_seconds / rows[0].seconds
    assert any("a step takes 1000.0 ms" in line for line in said) and "served; a step takes 3000.0 ms" in said
    shown = engine.report(rows, found, "facts").markdown()
    assert "of the ideal" in shown and "inter-token latency" in shown


def test_a_step_is_timed_by_an_idle_engine_before_and_after(tiny_model):
    rows, found = engine.measure(tiny_model, Full(), TRACE, slots=2, static=False)
    (row,) = rows
    assert row.tokens == TOKENS and row.seconds > 0 and row.ideal_seconds != row.ideal_seconds, "nothing was read apart"
    assert found.generated_tokens == TOKENS and found.requests == len(TRACE)
    saved = parse_json(engine.report(rows, found, "facts").json())
    assert saved["measured"][0]["ideal_seconds"] is None
    with pytest.raises(UsageError, match="this model's context is"):
        engine.measure(tiny_model, Full(), [Arrival(0.0, 10, 10**6)], slots=2)
