"""The engine: what a request answers is what ``generate`` answers to it alone, whatever comes and goes beside it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import KINDS, LM, POLICY, alone, assert_same, ids, make_row

import kvjax
from kvjax.engine.core import EngineCore
from kvjax.engine.engine import Engine
from kvjax.errors import UsageError
from kvjax.tables import stats_rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "storage"),
    [
        ("snapkv:ratio=0.5", "int8"),
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
        ("adaptive:ratio=0.5,inner=h2o", None),
        ("adaptive:budget=48,inner=ahakv", "int8"),
        ("think:channels=0.5,inner=snapkv(ratio=0.5)", "int8"),
        ("expected_attention:ratio=0.5", None),
        ("pyramidkv:ratio=0.5", None),
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
    """Random arrivals, lengths and cancellations, iteration by iteration; slots are all free in the end."""
    core = shared_core()
    rows, coming, wanted = [], [], []
    for i, (length, new, kind, seed) in enumerate(asked):
        options = {"max_new_tokens": new, "seed": seed, **KINDS[kind]}
        coming.append((sum(delays[:i]), make_row(core, ids(length, seed), **options)))
        wanted.append((ids(length, seed), options))
    cancelled = data.draw(st.sets(st.integers(0, len(asked) - 1), max_size=2))
    iteration = 0
    while coming or not core.loop.idle:
        while coming and coming[0][0] <= iteration:
            rows.append(coming.pop(0)[1])
            core.add(rows[-1])
        if iteration % 3 == 2:
            for i in [i for i in cancelled if i < len(rows) and rows[i].tokens]:
                core.cancel(rows[i])
        core.loop.iterate()
        iteration += 1
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


def test_nothing_compiles_after_warming():
    """Lengths, batches of admitted, options and stop strings are all arguments."""
    core = EngineCore(LM, "snapkv:ratio=0.25", slots=5, prompt_tokens=300, new_tokens=32)
    try:
        assert core.warm() > 0
        assert core.warm() == 0
        before = core.clock.programs
        rows = [
            make_row(core, ids(7 * i + 1, i), max_new_tokens=3 + i, seed=i, **KINDS[i % len(KINDS)]) for i in range(42)
        ]
        for row in rows:
            core.add(row)
        while not core.loop.idle:
            core.loop.iterate()
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


def test_the_only_slot_keeps_its_cache():
    """A cache that is left by the one slot of an engine is a copy: later requests, and the end, leave it as it is."""
    with Engine(LM, POLICY, slots=1, prompt_tokens=64, new_tokens=16) as engine:
        first = engine.submit(ids(20, 1), max_new_tokens=3, keep_cache=True, chat=False).result(120)
        engine.submit(ids(30, 2), max_new_tokens=3, chat=False).result(120)
    reference = alone(ids(20, 1), POLICY, max_new_tokens=3)
    asked = {"max_new_tokens": 4, "chat": False}
    wanted = kvjax.generate(LM, ids(5, 3), cache=reference.cache, **asked)
    assert kvjax.generate(LM, ids(5, 3), cache=first.cache, **asked).tokens == wanted.tokens


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
    unread = handles[5].result(60)
    assert unread.finish_reason == "cancelled" and unread.tokens == ()
    assert unread.stats.prompt_seconds == unread.stats.prompt_tokens_per_second == 0
    assert dict(stats_rows(unread))["cache live"] == "0 B"
    next(iter(handles[0]))
    handles[0].cancel()
    cut = handles[0].result(60)
    whole = alone(ids(30, 0), POLICY, max_new_tokens=350)
    assert cut.finish_reason in ("cancelled", "length") and whole.tokens[: len(cut.tokens)] == cut.tokens
    done = handles[1].result(120)
    handles[1].cancel()
    assert handles[1].result() is done and done.finish_reason == "length"


@pytest.mark.slow
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
    assert "generated tokens/s" in found.report().markdown() == str(found)


@pytest.mark.slow
def test_a_row_of_a_shared_context_goes_on(lagkv):
    rows = kvjax.generate(LM, [ids(4, 1), ids(6, 2)], context=ids(90, 3), policy=POLICY, max_new_tokens=5, chat=False)
    held = rows[1].cache
    found = lagkv.submit(ids(3, 4), cache=held, max_new_tokens=6, chat=False).result(60)
    assert found.tokens == kvjax.generate(LM, ids(3, 4), cache=held, max_new_tokens=6, chat=False).tokens


@pytest.mark.slow
def test_scores_of_a_context_and_what_follows_it(lagkv):
    options = {"context": ids(30, 5), "max_new_tokens": 3, "prompt_logprobs": True, "chat": False}
    found = lagkv.submit(ids(8, 6), **options).result(60)
    assert_same(found, kvjax.generate(LM, ids(8, 6), policy=POLICY, **options))
    assert found.prompt_logprobs is not None and len(found.prompt_logprobs) == 38


@pytest.mark.slow
def test_warming_an_engine_that_others_use(lagkv):
    lagkv.warm()
    assert lagkv.warm() == 0
