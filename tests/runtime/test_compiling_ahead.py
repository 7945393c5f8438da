"""What follows a first prompt is compiled while that is, once, and its time is counted where it is waited for."""

from __future__ import annotations

import pytest
import toys
from support.compiled import compiled_programs

import kvjax
from kvjax.sharding import compile_thread


@pytest.mark.parametrize("context", [None, "abc" * 30])
@pytest.mark.parametrize("policy", ["full", "lagkv:ratio=0.5,lag=16", "h2o:budget=20", "razor:heads=0.0"])
def test_the_programs_begun_ahead_are_those_that_are_called(tiny_model, monkeypatch, policy, context):
    begun, called = [], []
    start, compile_ = compile_thread.start, compile_thread._compile
    monkeypatch.setattr("kvjax.runtime.programs._begun", set())
    monkeypatch.setattr(compile_thread, "_begun", set())
    monkeypatch.setattr(compile_thread, "_ahead", {})  # what a test before began and did not call
    monkeypatch.setattr(
        compile_thread, "start", lambda jitted, *a, **k: (begun.append(jitted.__name__), start(jitted, *a, **k))
    )
    monkeypatch.setattr(
        compile_thread, "_compile", lambda jitted, *a: (called.append(jitted.__name__), compile_(jitted, *a))
    )
    with compiled_programs() as programs:
        output = kvjax.generate(toys.tiny_model(), "one", context=context, policy=policy, max_new_tokens=4)
    expected = {"decode_chunk"} | ({"prefill_onto"} if context else set())
    assert set(begun) == expected and set(called) == {"prefill_fresh", *expected}
    assert {name: programs[name] for name in called} == dict.fromkeys(called, 1)
    assert not compile_thread._ahead and output.stats.compile_seconds > 0
    again = kvjax.generate(toys.tiny_model(), "one", context=context, policy=policy, max_new_tokens=4)
    assert again.tokens == output.tokens and again.stats.compile_seconds == 0


def test_an_error_of_the_compiler_is_the_calls_own(monkeypatch):
    class Jitted:
        def lower(self, *arguments, **static):
            return self

        def compile(self):
            raise RuntimeError("no registers left")

    jitted = Jitted()
    compile_thread.start(jitted, 1)
    with pytest.raises(RuntimeError, match="no registers"):
        compile_thread.call(jitted, "broken", 1)
