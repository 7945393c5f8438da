"""The engine: what a request answers is what ``generate`` answers to it alone, whatever comes and goes beside it."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import tiny_model

import kvjax
from kvjax.engine.core import EngineCore
from kvjax.engine.engine import Engine, QueueFull
from kvjax.engine.row import Row
from kvjax.errors import DoesNotFit, KvjaxError, UsageError
from kvjax.options import GenerationOptions
from kvjax.request import Request

LM = tiny_model(max_position=1024)
#: Options of requests that differ in everything that a row may have for itself.
KINDS = (
    {},
    {"temperature": 0.9, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.4},
    {"stop": ["a", "zz"], "temperature": 1.0},
    {"logprobs": True, "min_p": 0.01, "temperature": 0.7},
    {"stop": "e", "stop_token_ids": [65, 66], "temperature": 1.0},
)


def ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def alone(prompt: list[int], policy: str | kvjax.Policy, storage: str | None = None, **options) -> kvjax.Output:
    return kvjax.generate(LM, prompt, policy=policy, storage=storage, chat=False, **options)


def assert_same(found: kvjax.Output, wanted: kvjax.Output) -> None:
    assert found.tokens == wanted.tokens
    assert (found.text, found.finish_reason) == (wanted.text, wanted.finish_reason)
    assert found.stats.retained == wanted.stats.retained and found.stats.seen == wanted.stats.seen
    assert found.stats.clipped == wanted.stats.clipped
    for own, other in ((found.logprobs, wanted.logprobs), (found.prompt_logprobs, wanted.prompt_logprobs)):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            assert [x is None for x in own] == [x is None for x in other]
            np.testing.assert_allclose([x or 0 for x in own], [x or 0 for x in other], atol=1e-4)


@pytest.fixture(scope="module")
def lagkv():
    """One engine for all tests that need any: it must be idle when they begin and end."""
    with Engine(LM, "lagkv:ratio=0.5,lag=16,sink=4", slots=3, prompt_tokens=320, new_tokens=80) as engine:
        yield engine
        assert engine.drain(60)


POLICY = "lagkv:ratio=0.5,lag=16,sink=4"


@pytest.mark.parametrize(
    ("policy", "storage"),
    [
        ("snapkv:ratio=0.5", "int8"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("full", None),
                ("full", "int8"),
                ("snapkv:ratio=0.5", None),
                ("ahakv:budget=48", "int8"),
                ("h2o:ratio=0.5", None),
                ("streamingllm:window=32", "int8"),
                ("keydiff:ratio=0.5", None),
                ("tova:budget=40", None),
                ("slimkv:ratio=0.5", None),
                ("nacl:ratio=0.5", None),
                ("compactor:ratio=0.5", None),
                ("kvzip:ratio=0.5", None),
                ("criticalkv:ratio=0.5", None),
                ("chunkkv:ratio=0.5", None),
                ("adaptive:ratio=0.5", None),
                ("adaptive:ratio=0.5,scope=model", "int8"),
                ("think:channels=0.5,inner=snapkv(ratio=0.5)", "int8"),
                ("expected_attention:ratio=0.5", None),
                ("pyramidkv:ratio=0.5", None),
            )
        ),
    ],
)
def test_a_row_is_the_row_alone(policy, storage):
    """More requests than slots, of all lengths and options; prompts above 256 tokens are read layer by layer."""
    lengths = [5, 300, 17, 64, 2, 260, 130, 90]
    with Engine(LM, policy, storage, slots=3, prompt_tokens=320, new_tokens=48, max_pause=0.0) as engine:
        handles = []
        for i, length in enumerate(lengths):
            options = {"max_new_tokens": 4 + 6 * i, "seed": i, **KINDS[i % len(KINDS)]}
            handles.append((engine.submit(ids(length, i), chat=False, **options), length, i, options))
        for handle, length, i, options in handles:
            assert_same(handle.result(120), alone(ids(length, i), policy, storage, **options))


requests = st.tuples(st.integers(1, 320), st.integers(1, 40), st.integers(0, len(KINDS) - 1), st.integers(0, 2**31 - 1))


@settings(max_examples=6, deadline=None)
@given(st.lists(requests, min_size=1, max_size=8), st.lists(st.integers(0, 9), max_size=8), st.data())
def test_whatever_comes_and_goes_beside_it(asked, delays, data):
    """Random arrivals, lengths and cancellations, turn by turn; slots are all free in the end."""
    core = shared_core()
    rows, coming, wanted = [], [], []
    for i, (length, new, kind, seed) in enumerate(asked):
        options = {"max_new_tokens": new, "seed": seed, **KINDS[kind]}
        coming.append((sum(delays[:i]), make_row(core, ids(length, seed), **options)))
        wanted.append((ids(length, seed), options))
    cancelled = data.draw(st.sets(st.integers(0, len(asked) - 1), max_size=2))
    turn = 0
    while coming or not core.loop.idle:
        while coming and coming[0][0] <= turn:
            rows.append(coming.pop(0)[1])
            core.add(rows[-1])
        if turn % 3 == 2:
            for i in [i for i in cancelled if i < len(rows) and rows[i].tokens]:
                core.cancel(rows[i])
        core.loop.turn()
        turn += 1
    for i, (row, (prompt, options)) in enumerate(zip(rows, wanted, strict=True)):
        assert row.error is None and row.output is not None
        reference = alone(prompt, POLICY, **options)
        if row.cancelled and row.output.finish_reason == "cancelled":
            assert i in cancelled and reference.tokens[: len(row.tokens)] == tuple(row.tokens)
        else:
            assert_same(row.output, reference)
    assert core.loop.scheduler.free == core.sizes.slots and not any(core.slots.rows)


_CORES: list[EngineCore] = []


def shared_core() -> EngineCore:
    if not _CORES:
        _CORES.append(EngineCore(LM, POLICY, slots=3, prompt_tokens=320, new_tokens=64, max_pause=0.0))
    return _CORES[0]


def make_row(core: EngineCore, prompt: list[int], **options) -> Row:
    chosen = GenerationOptions(policy=core.policy.chosen, storage=core.storage, chat=False, **options)
    return core.slots.row_of(Request(core.lm, prompt, chosen, exact=True), limit=chosen.max_new_tokens)


def test_nothing_compiles_after_warming():
    """Lengths, batches of admitted, options and stop strings are all arguments."""
    core = EngineCore(LM, "snapkv:ratio=0.25", slots=5, prompt_tokens=600, new_tokens=32)
    try:
        assert core.warm() > 0
        assert core.warm() == 0
        before = core.clock.programs
        rows = [
            make_row(core, ids(7 * i + 1, i), max_new_tokens=3 + i, seed=i, **KINDS[i % len(KINDS)]) for i in range(84)
        ]
        for row in rows:
            core.add(row)
        while not core.loop.idle:
            core.loop.turn()
        assert all(row.output is not None for row in rows)
        assert core.clock.programs == before
    finally:
        core.close()


def test_a_cache_a_context_and_a_conversation_go_on(lagkv):
    """What goes on with a cache is what ``generate`` goes on with, and many may ask about one."""
    text, questions = ids(150, 1), [ids(9, 2), ids(30, 3), ids(1, 4)]
    held = kvjax.read(LM, text, policy=POLICY, chat=False)
    asked = [lagkv.submit(question, cache=held, max_new_tokens=12, chat=False) for question in questions]
    over = [lagkv.submit(question, context=text, max_new_tokens=12, chat=False) for question in questions]
    for one, other, question in zip(asked, over, questions, strict=True):
        wanted = kvjax.generate(LM, question, cache=held, max_new_tokens=12, chat=False)
        assert one.result(120).tokens == other.result(120).tokens == wanted.tokens
    first = lagkv.submit(ids(40, 5), max_new_tokens=10, keep_cache=True, chat=False).result(120)
    reference = alone(ids(40, 5), POLICY, max_new_tokens=10)
    second = lagkv.submit(ids(8, 6), cache=first.cache, max_new_tokens=10, chat=False).result(120)
    later = kvjax.generate(LM, ids(8, 6), cache=reference.cache, max_new_tokens=10, chat=False)
    assert second.tokens == later.tokens and second.stats.seen == later.stats.seen
    again = kvjax.generate(LM, ids(8, 6), cache=first.cache, max_new_tokens=10, chat=False)
    assert again.tokens == later.tokens
    with pytest.raises(UsageError, match="keep_cache=True"):
        _ = second.cache


def test_pieces_come_as_tokens_do(lagkv):
    wanted = alone(ids(20, 7), POLICY, max_new_tokens=40, temperature=1.0, seed=3)

    async def gathered() -> tuple[str, kvjax.Output, int]:
        handle = lagkv.submit(ids(20, 7), max_new_tokens=40, temperature=1.0, seed=3, chat=False)
        pieces = [piece async for piece in handle]
        assert (await handle) is pieces[-1].output
        return "".join(piece.text for piece in pieces), pieces[-1].output, len(pieces)

    text, output, count = asyncio.run(gathered())
    assert text == wanted.text == output.text and count > 3
    handle = lagkv.submit(ids(20, 7), max_new_tokens=40, temperature=1.0, seed=3, chat=False)
    assert "".join(piece.text for piece in handle) == wanted.text
    assert [piece.tokens for piece in handle.stream()][-1] == () and handle.done


def test_threads_submit_and_wait(lagkv):
    found: dict[int, tuple[int, ...]] = {}

    def ask(i: int) -> None:
        found[i] = lagkv.submit(ids(10 + i, i), max_new_tokens=6, chat=False).result(120).tokens

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {i: alone(ids(10 + i, i), POLICY, max_new_tokens=6).tokens for i in range(6)}


def test_calling_off(lagkv):
    """What runs keeps what it has, what waits has nothing, and what has ended stays."""
    handles = [lagkv.submit(ids(30, i), max_new_tokens=350, chat=False) for i in range(6)]
    handles[5].cancel()
    assert handles[5].result(60).finish_reason == "cancelled" and handles[5].result().tokens == ()
    next(iter(handles[0]))
    handles[0].cancel()
    cut = handles[0].result(60)
    whole = alone(ids(30, 0), POLICY, max_new_tokens=350)
    assert cut.finish_reason in ("cancelled", "length") and whole.tokens[: len(cut.tokens)] == cut.tokens
    done = handles[1].result(120)
    handles[1].cancel()
    assert handles[1].result() is done and done.finish_reason == "length"


def test_a_row_whose_slot_is_full_ends_by_memory_and_the_others_go_on():
    """The longest prompt has room for what was asked of the engine; a shorter one for as much more."""
    with Engine(LM, "full", slots=2, prompt_tokens=64, new_tokens=256) as engine:
        long, short = (engine.submit(ids(n, n), max_new_tokens=400, chat=False) for n in (64, 10))
        other = engine.submit(ids(9, 9), max_new_tokens=20, chat=False)
        assert long.result(120).finish_reason == "memory" and len(long.result().tokens) == 257
        assert short.result(120).finish_reason == "memory" and len(short.result().tokens) == 257 + 54
        assert_same(other.result(120), alone(ids(9, 9), "full", max_new_tokens=20))
        wanted = alone(ids(64, 64), "full", max_new_tokens=400)
        assert wanted.tokens[:257] == long.result().tokens
        empty = engine.submit(ids(33, 1), max_new_tokens=0, keep_cache=True, chat=False).result(60)
        assert empty.tokens == () and empty.finish_reason == "length" and int(empty.cache.seen[0]) == 33


def test_bounded_policies_generate_beyond_any_room():
    with Engine(LM, "streamingllm:window=32", slots=2, prompt_tokens=64, new_tokens=16) as engine:
        found = engine.submit(ids(20, 1), max_new_tokens=700, chat=False).result(120)
    assert found.tokens == alone(ids(20, 1), "streamingllm:window=32", max_new_tokens=700).tokens


def test_scores_of_prompts(lagkv):
    options = {"max_new_tokens": 4, "prompt_logprobs": True}
    for length in (12, 290):
        found = lagkv.submit(ids(length, 8), chat=False, **options).result(120)
        assert_same(found, alone(ids(length, 8), POLICY, **options))


def test_what_it_says_of_itself(lagkv):
    handle = lagkv.submit(ids(10, 1), max_new_tokens=5, chat=False)
    handle.result(60)
    assert lagkv.drain(60)
    at = handle.times
    assert at.started is not None and at.first_token is not None and at.finished is not None
    assert at.arrived <= at.started <= at.first_token <= at.finished <= time.perf_counter()
    found = lagkv.report()
    assert found.slots == 3 and found.requests >= 1 and 0 < found.decoding <= 1
    assert "generated tokens/s" in found.report().markdown()


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


def test_ctrl_c_while_it_is_left_frees_the_slots(monkeypatch):
    engine = Engine(LM, POLICY, slots=3, prompt_tokens=320, new_tokens=80)

    def pressed(timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "drain", pressed)
    with pytest.raises(KeyboardInterrupt), engine:
        engine.submit(ids(9, 1), max_new_tokens=70, chat=False)
    assert not engine._thread.is_alive()


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


def test_a_row_of_a_shared_context_goes_on(lagkv):
    rows = kvjax.generate(LM, [ids(4, 1), ids(6, 2)], context=ids(90, 3), policy=POLICY, max_new_tokens=5, chat=False)
    held = rows[1].cache
    found = lagkv.submit(ids(3, 4), cache=held, max_new_tokens=6, chat=False).result(60)
    assert found.tokens == kvjax.generate(LM, ids(3, 4), cache=held, max_new_tokens=6, chat=False).tokens


def test_scores_of_a_context_and_what_follows_it(lagkv):
    options = {"context": ids(30, 5), "max_new_tokens": 3, "prompt_logprobs": True, "chat": False}
    found = lagkv.submit(ids(8, 6), **options).result(60)
    assert_same(found, kvjax.generate(LM, ids(8, 6), policy=POLICY, **options))
    assert found.prompt_logprobs is not None and len(found.prompt_logprobs) == 38


def test_warming_an_engine_that_others_use(lagkv):
    lagkv.warm()
    assert lagkv.warm() == 0


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
