"""The engine beside its answers: pauses, errors of single rows, what it says after long, bursts, closing early."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from toys import tiny_model

import kvjax
from kvjax.engine.core import EngineCore
from kvjax.engine.engine import Engine, QueueFull
from kvjax.engine.engine_report import Totals
from kvjax.engine.loop import Loop
from kvjax.errors import UsageError
from kvjax.policies import Policy, Selection, parse
from kvjax.policies.window_layers import for_model
from kvjax.runtime import prefill_by_layers
from kvjax.runtime.alike_layers import can_stop_between_layers
from kvjax.sharding.compile import Program

LM = tiny_model(max_position=1024)


def ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def alone(prompt: list[int], tokens: int) -> kvjax.Output:
    return kvjax.generate(LM, prompt, policy=NothingOfFifty(), chat=False, max_new_tokens=tokens)


def same(found: kvjax.Output, wanted: kvjax.Output) -> None:
    assert found.tokens == wanted.tokens and found.stats.retained == wanted.stats.retained


@pytest.mark.parametrize("policy", ["full", "kvzip:ratio=0.5"])
def test_long_prompts_are_left_when_a_layer_is_read_and_not_when_it_is_begun(monkeypatch, policy):
    """Devices take programs before they run them; a clock that only sees them taken would keep nobody's pause."""
    deep, made, when_left = tiny_model(max_position=1024, num_layers=8), [], []
    run, read_on = Program.__call__, Loop._read_on

    def kept(self, *arguments, **static):
        found = run(self, *arguments, **static)
        if self is prefill_by_layers.PREFILL_LAYER_FRESH:
            made.append(jax.tree.leaves(found[0])[0])
        return found

    def noted(self, place):
        read_on(self, place)
        if made:
            when_left.append(made[-1].is_ready())

    monkeypatch.setattr(Program, "__call__", kept)
    monkeypatch.setattr(Loop, "_read_on", noted)
    with Engine(deep, policy, slots=1, prompt_tokens=1000, new_tokens=4) as engine:
        engine.submit(ids(990, 1), max_new_tokens=1, chat=False).result(120)
        made.clear()
        engine.submit(ids(980, 1), max_new_tokens=1, chat=False).result(120)
    assert len(made) == 8 and len(when_left) >= 8 and all(when_left)


@pytest.mark.slow
def test_prompts_under_razor_are_left_between_layers_too():
    """Layers with other retrieval heads have programs of their own; half as many as layers are few enough."""
    policy = "razor:ratio=0.5,heads=0.0+1.1+2.2+3.3"  # and layers without any: five kinds
    heads = {"num_heads": 4, "num_kv_heads": 4}
    for layers, few in ((8, False), (12, True)):
        lm = tiny_model(max_position=1024, num_layers=layers, **heads)
        assert can_stop_between_layers(for_model(parse(policy), lm.config), lm.config) is few
    with Engine(lm, policy, slots=2, prompt_tokens=400, new_tokens=8, max_pause=0.0) as engine:
        asked = [ids(390, 1), ids(20, 2), ids(300, 3)]
        handles = [engine.submit(prompt, max_new_tokens=6, chat=False) for prompt in asked]
        for prompt, handle in zip(asked, handles, strict=True):
            same(handle.result(120), kvjax.generate(lm, prompt, policy=policy, chat=False, max_new_tokens=6))


@dataclasses.dataclass(frozen=True)
class NothingOfFifty(Policy):
    """Keeps nothing of a prompt of 50 tokens, which its author did not see."""

    def select(self, layer, cache, candidates, chunk):
        return Selection(candidates.valid & (chunk.total[:, None, None] != 50), {}, cache.state)


def test_a_policys_mistake_is_the_error_of_that_row_alone():
    """Of those that are read together; the others are answered."""
    with Engine(LM, NothingOfFifty(), slots=4, prompt_tokens=64, new_tokens=8) as engine:
        handles = [engine.submit(ids(n, n), max_new_tokens=4, chat=False) for n in (49, 50, 51, 52)]
        for n, handle in zip((49, 50, 51, 52), handles, strict=True):
            if n == 50:
                with pytest.raises(UsageError, match=r"NothingOfFifty\.select keeps nothing of 50 tokens"):
                    handle.result(120)
            else:
                same(handle.result(120), alone(ids(n, n), 4))
        again = engine.submit(ids(9, 2), max_new_tokens=2, chat=False).result(60)
        same(again, alone(ids(9, 2), 2))


def test_a_report_counts_what_it_has_forgotten_the_times_of(monkeypatch):
    monkeypatch.setattr("kvjax.engine.engine._REMEMBERED", 3)
    with Engine(LM, "full", slots=2, prompt_tokens=64, new_tokens=8) as engine:
        for i in range(8):
            engine.submit(ids(5 + i, i), max_new_tokens=3, chat=False).result(60)
        assert engine.drain(60)
        found, began, now = engine.report(), engine._began, time.perf_counter()
    assert (found.requests, found.generated_tokens, found.prompt_tokens) == (8, 24, sum(range(5, 13)))
    assert len(found.served) == 3 and found.seconds <= now - began
    sums = Totals()
    for one in found.served:
        sums = sums.plus(one, now)
    assert sums.requests == 3 and found.decoding * found.seconds * 2 > sums.decoding > 0
    assert found.prefilling * found.seconds * 2 > sums.prefilling > 0


def test_a_burst_that_free_slots_take_does_not_wait():
    with Engine(LM, "full", slots=4, prompt_tokens=64, new_tokens=256, queue=1) as engine:
        held = [engine.submit(ids(8, i), max_new_tokens=200, chat=False) for i in range(5)]  # one of them waits
        with pytest.raises(QueueFull, match=r"holds \(1\)"):
            for i in range(9):
                engine.submit(ids(8, i), max_new_tokens=200, chat=False)
        for handle in held:
            handle.cancel()


def test_closing_does_not_wait_for_the_rest_of_a_warm_up(monkeypatch):
    engine = Engine(LM, "full", slots=2, prompt_tokens=1000, new_tokens=8)
    begun, go_on, ran = threading.Event(), threading.Event(), []

    def dummies(self, count, tokens, new):
        ran.append(tokens)
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(EngineCore, "_run_dummies", dummies)
    with ThreadPoolExecutor() as threads:
        warming, other = threads.submit(engine.warm), threads.submit(engine.warm)
        assert begun.wait(60)
        closing = threads.submit(engine.close)
        while not engine._closing:
            time.sleep(0.01)
        go_on.set()
        closing.result(60)
        for each in (warming, other):
            with pytest.raises(UsageError, match="closed before this had ended"):
                each.result(60)
    assert len(ran) == 1
