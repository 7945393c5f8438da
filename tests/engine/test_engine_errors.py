"""What an engine refuses, and what goes on after an error: of a request, of the engine, of who waits."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import jax
import pytest
from support.engines import LM, POLICY, ids

import kvjax
from kvjax.engine.engine import Engine, QueueFull
from kvjax.errors import DoesNotFit, KvjaxError, UsageError
from kvjax.options import GenerationOptions


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Engine(LM, kvjax.RoundAttention()), "no slots of one size"),
        (lambda: Engine(LM, slots=0), "slots"),
        (lambda: Engine(LM, prompt_tokens=0), "prompt_tokens"),
        (lambda: Engine(LM, prompt_tokens=10**6), "this model.s context is"),
        (lambda: Engine(LM, max_pause=-1.0), "max_pause"),
        (lambda: Engine(LM, queue=0), "queue"),
        (lambda: Engine("smollm2", slots=2), "kvjax.load"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_engines_that_make_no_sense(make, sentence):
    with pytest.raises(UsageError, match=sentence):
        make()


def test_what_does_not_fit_is_refused_before_it_is_allocated():
    with pytest.raises(DoesNotFit, match=r"\d+ slots would fit"):
        Engine(LM, slots=64, prompt_tokens=512, memory_limit=8_000_000)
    with pytest.raises(DoesNotFit, match="smaller"):
        Engine(LM, slots=1, prompt_tokens=512, memory_limit=100_000)
    with Engine(LM, prompt_tokens=512, memory_limit=8_000_000) as engine:
        assert 1 < engine.sizes.slots < 64 and engine.sizes.total_bytes <= 8_000_000


def test_requests_that_make_no_sense(lagkv):
    for asked, sentence in (
        ({"prompt": ids(600, 1)}, "prompt_tokens=600"),
        ({"prompt": [ids(3, 1), ids(4, 1)]}, "one prompt"),
        ({"prompt": [400]}, "token id"),
        ({"prompt": ids(3, 1), "policy": "full"}, "submit takes no 'policy'"),
        ({"prompt": ids(3, 1), "options": GenerationOptions(policy="full")}, "the engine's"),
        ({"prompt": ids(3, 1), "cache": kvjax.read(LM, ids(5, 1), policy="full", chat=False)}, "an engine of its own"),
        ({"prompt": ids(3, 1), "stop": "a" * 1001}, "stop strings"),
        ({"prompt": ids(3, 1), "temperature": -1}, "temperature"),
    ):
        with pytest.raises(UsageError, match=sentence):
            lagkv.submit(**asked, chat=False)


def test_a_full_queue_and_a_closed_engine():
    engine = Engine(LM, "full", slots=1, prompt_tokens=64, new_tokens=256, queue=2)
    with pytest.raises(QueueFull, match=r"As many requests wait as .* holds \(2\)"):
        for i in range(9):
            engine.submit(ids(8, i), max_new_tokens=200, chat=False)
    waiting = list(engine._handles.values())
    engine.close()
    with pytest.raises(KvjaxError, match="closed"):
        waiting[-1].result(10)
    with pytest.raises(UsageError, match="closed"):
        engine.submit(ids(8, 1), chat=False)


@pytest.mark.slow
def test_a_list_that_does_not_fit_together_is_answered_all_the_same():
    """As many at a time as fit; each prompt draws what it would draw in one batch."""
    prompts = [ids(10 + 9 * i, i) for i in range(40)]
    options = {"max_new_tokens": 9, "temperature": 1.0, "seed": 5, "chat": False}
    with pytest.raises(DoesNotFit):
        kvjax.generate(LM, prompts, memory_limit=100_000, **options)
    few = kvjax.generate(LM, prompts, memory_limit=12_000_000, **options)
    whole = kvjax.generate(LM, prompts, **options)
    assert [output.tokens for output in few] == [output.tokens for output in whole]
    assert few[0].stats.device_cache_bytes < whole[0].stats.device_cache_bytes
    with pytest.raises(UsageError, match="fewer prompts"):
        _ = few[0].cache
    with pytest.raises(DoesNotFit, match="a batch of"):
        kvjax.generate(LM, prompts, memory_limit=12_000_000, n=2, **options)


def test_an_error_of_the_engine_is_told_to_everybody(monkeypatch):
    """Nobody waits for ever: not who waits for a result, nor who waits for all of them."""
    engine = Engine(LM, POLICY, slots=3, prompt_tokens=320, new_tokens=80)
    waited = threading.Thread(target=engine.drain)
    asked = threading.Event()
    monkeypatch.setattr(engine._core.slots, "decode", lambda *given: asked.wait(60) and 1 / 0)
    handles = [engine.submit(ids(9, i), max_new_tokens=9, chat=False) for i in range(5)]
    waited.start()
    asked.set()
    for handle in handles:
        with pytest.raises(KvjaxError, match="has stopped: ZeroDivisionError"):
            handle.result(60)
    waited.join(60)
    assert not waited.is_alive() and engine.drain(1)
    with pytest.raises(KvjaxError, match="has stopped"):
        engine.submit(ids(9, 1), chat=False)
    engine.close()


@pytest.mark.parametrize("where", ["in the block", "while it is drained", "while it is closed"])
def test_ctrl_c_is_not_kept_waiting_by_what_runs(monkeypatch, where):
    """The engine's thread goes on to the end of its program, and frees the slots then."""
    engine = Engine(LM, POLICY, slots=3, prompt_tokens=320, new_tokens=80)
    going_on = threading.Event()
    decode = engine._core.slots.decode
    monkeypatch.setattr(engine._core.slots, "decode", lambda *given: going_on.wait(60) and decode(*given))

    def pressed(*given, **more):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched, engine:
        handle = engine.submit(ids(9, 1), max_new_tokens=70, chat=False)
        if where == "in the block":
            pressed()
        elif where == "while it is drained":
            patched.setattr(engine, "drain", pressed)
        else:
            handle.cancel()
            patched.setattr(engine, "drain", bool)
            patched.setattr(engine._thread, "join", pressed)
    assert engine._thread.is_alive() and not slots_are_free(engine)
    going_on.set()
    engine._thread.join(60)
    assert not engine._thread.is_alive() and slots_are_free(engine)
    if where != "while it is closed":
        with pytest.raises(UsageError, match="closed before this had ended"):
            handle.result(0)
    engine.close()


def test_nothing_is_kept_of_an_engine_that_has_ended():
    """The process keeps a list of engines to be closed at its end, and with one its model."""
    engine = Engine(LM, POLICY, slots=2, prompt_tokens=64, new_tokens=16)
    engine.submit(ids(9, 1), max_new_tokens=2, chat=False).result(60)
    there = weakref.ref(engine)
    engine.close()
    del engine
    gc.collect()
    assert there() is None


def slots_are_free(engine: Engine) -> bool:
    return all(x.is_deleted() for layer in engine._core.slots._state.cache.layers for x in jax.tree.leaves(layer.kv))


def test_an_event_loop_that_is_gone_is_nobody_elses_trouble(lagkv):
    loops = []

    async def leave() -> None:
        loops.append(asyncio.get_running_loop())
        handle = lagkv.submit(ids(20, 7), max_new_tokens=60, chat=False)
        handle._listeners.append(lambda: None)
        async for _ in handle:
            from kvjax.engine.handle import _Listening

            _Listening(handle).__enter__()  # left behind, as by a task that was never closed
            break

    asyncio.run(leave())
    assert loops[0].is_closed()
    assert lagkv.submit(ids(5, 1), max_new_tokens=70, chat=False).result(60).finish_reason == "length"


def test_stop_strings_of_requests_that_fail_are_forgotten(lagkv, monkeypatch):
    slots = lagkv._core.slots
    with monkeypatch.context() as patched:

        def fails(*given, **more):
            raise UsageError("No.")

        patched.setattr(slots.programs.__class__, "insert", fails)
        for i in range(6):
            with pytest.raises(UsageError, match="No"):
                lagkv.submit(ids(5, i), stop=f"{i}" * 900, chat=False).result(60)
    assert not any(slots._stops._users.values())
    assert lagkv.submit(ids(5, 1), max_new_tokens=3, stop="never" * 100, chat=False).result(60).tokens


def test_a_cache_that_was_consumed_meanwhile_fails_its_own_request_alone():
    cache = kvjax.read(LM, "hello there", chat=False)
    options = {"chat": False, "stop_token_ids": []}
    with Engine(LM, slots=1, prompt_tokens=128, new_tokens=256) as engine:
        running = engine.submit("abc", max_new_tokens=250, **options)
        waiting = engine.submit("q", cache=cache, max_new_tokens=3, **options)
        other = engine.submit("another user", max_new_tokens=5, **options)
        kvjax.generate(LM, "z", cache=cache, consume_cache=True, max_new_tokens=2, **options)
        assert len(running.result().tokens) == 250 and len(other.result().tokens) == 5
        with pytest.raises(UsageError, match="consumed by an earlier call"):
            waiting.result()
        assert len(engine.submit("later", max_new_tokens=2, **options).result().tokens) == 2
