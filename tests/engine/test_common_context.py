"""An engine whose requests all go on with one context: rows as they are alone, and the context's bytes once."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
import toys
from support.compiled import compiled_programs
from support.scorers import with_profiles

import kvjax
from kvjax.policies import parse

RNG = np.random.default_rng(0)
CONTEXT = [int(x) for x in RNG.integers(3, 250, 203)]
QUESTIONS = [[int(x) for x in RNG.integers(3, 250, count)] for count in (5, 40, 1, 90, 12, 33, 7)]
SIZES = {"slots": 3, "prompt_tokens": 96, "new_tokens": 64}


def answers(engine, questions=QUESTIONS, **options) -> list[kvjax.Output]:
    draw = random.Random(1)
    handles = [engine.submit(ids, max_new_tokens=draw.randint(1, 30), logprobs=True, **options) for ids in questions]
    return [handle.result(120) for handle in handles]


@pytest.mark.parametrize(
    ("policy", "storage", "once"),
    [
        ("snapkv:ratio=0.25", "model", True),
        ("adaptive:ratio=0.25,inner=keydiff", "int8", True),
        pytest.param("full", "model", False, marks=pytest.mark.slow),
        pytest.param("lagkv:ratio=0.5,lag=16,sink=4", "model", False, marks=pytest.mark.slow),
        pytest.param("razor:heads=0.0,ratio=0.6,inner=compactor", "model", True, marks=pytest.mark.slow),
        pytest.param("razor:heads=0.0+1.1,ratio=0.8", "model", False, marks=pytest.mark.slow),
        pytest.param("learned:ratio=0.25", "model", True, marks=pytest.mark.slow),
    ],
)
def test_rows_are_those_of_generate(tiny_model, policy, storage, once):
    asked = with_profiles(parse(policy), tiny_model.config)
    context = kvjax.read(tiny_model, CONTEXT, policy=asked, storage=storage, once=once)
    with kvjax.Engine(tiny_model, context=context, **SIZES) as engine:
        outputs = answers(engine)
        sizes = engine.sizes
    draw = random.Random(1)
    for output, question in zip(outputs, QUESTIONS, strict=True):
        most = draw.randint(1, 30)
        alone = kvjax.generate(tiny_model, question, cache=context, max_new_tokens=most, logprobs=True)
        assert output.tokens == alone.tokens and output.finish_reason == alone.finish_reason
        np.testing.assert_allclose(output.logprobs, alone.logprobs, atol=1e-4 if storage == "model" else 0.05)
        assert output.stats.retained == alone.stats.retained and output.stats.seen == alone.stats.seen
        assert output.stats.shared_cache_bytes == sizes.context_bytes > 0
        assert output.stats.device_cache_bytes == sizes.slots_bytes + sizes.context_bytes
    # The context stays a value.
    again = kvjax.generate(tiny_model, QUESTIONS[0], cache=context, max_new_tokens=4)
    assert again.tokens == outputs[0].tokens[:4] or len(outputs[0].tokens) < 4


def test_samples_and_kept_caches_go_on(tiny_model):
    context = kvjax.read(tiny_model, CONTEXT, policy="snapkv:ratio=0.25", once=True)
    with kvjax.Engine(tiny_model, context=context, **SIZES) as engine:
        kept = engine.submit(QUESTIONS[1], max_new_tokens=5, keep_cache=True).result(120)
        drawn = engine.submit(QUESTIONS[1], max_new_tokens=5, temperature=1.0, seed=3).result(120)
    alone = kvjax.generate(tiny_model, QUESTIONS[1], cache=context, max_new_tokens=5)
    assert (
        drawn.tokens
        == kvjax.generate(tiny_model, QUESTIONS[1], cache=context, max_new_tokens=5, temperature=1.0, seed=3).tokens
    )
    later = [kvjax.generate(tiny_model, [7, 8], cache=one.cache, max_new_tokens=5).tokens for one in (kept, alone)]
    assert later[0] == later[1]
    pools = [jax.tree.leaves(one.cache.context) for one in (kept, alone)]
    assert all(a is b for a, b in zip(*pools, strict=True))


def test_nothing_compiles_after_warm_up_and_slots_hold_no_context(tiny_model):
    context = kvjax.read(tiny_model, CONTEXT, policy="snapkv:ratio=0.25", once=True)
    with kvjax.Engine(tiny_model, context=context, **SIZES) as engine, compiled_programs() as programs:
        engine.warm()
        before = dict(programs)
        answers(engine)
        assert dict(programs) == before
        few = engine.sizes
    with kvjax.Engine(tiny_model, context=context, **SIZES | {"slots": 6}) as engine:
        many = engine.sizes
    assert many.context_bytes == few.context_bytes == sum(x.nbytes for x in jax.tree.leaves(context.context))
    assert many.slots_bytes == 2 * few.slots_bytes
    with kvjax.Engine(tiny_model, **SIZES | {"prompt_tokens": 203 + 96}) as engine:
        assert engine.sizes.slots_bytes > 1.5 * few.slots_bytes


def test_a_full_slot_ends_by_memory_and_no_earlier(tiny_model):
    lm = toys.tiny_model(max_position=2048)
    context = kvjax.read(lm, CONTEXT, policy="snapkv:ratio=0.25", once=True)
    with kvjax.Engine(lm, context=context, slots=1, prompt_tokens=64, new_tokens=64) as engine:
        output = engine.submit(QUESTIONS[1], max_new_tokens=900, stop_token_ids=()).result(120)
        new, own = engine.sizes.new_capacity, engine.sizes.own_capacity
    assert output.finish_reason == "memory"
    assert len(output.tokens) == new + own - len(QUESTIONS[1]) + 1


@pytest.mark.parametrize(
    ("read", "engine", "submit", "sentence"),
    [
        ({"policy": "snapkv:ratio=0.25"}, {}, None, "read it with once=True"),
        ({"policy": "h2o:ratio=0.5"}, {}, None, "every question has a copy"),
        ({"storage": "int8"}, {}, None, "as int8 every question has a copy"),
        ({}, {"policy": "lagkv"}, None, "was compressed by full"),
        ({}, {"prompt_tokens": 400}, None, "203 of it are taken, give at most 309"),
        ({}, {}, {"context": "more"}, "leave cache= and context= out"),
        ({}, {}, {"cache": True}, "leave cache= and context= out"),
        ({}, {"prompt_tokens": 32}, {}, "make one with prompt_tokens="),
    ],
)
def test_what_makes_no_sense_is_one_sentence(tiny_model, read, engine, submit, sentence):
    context = kvjax.read(tiny_model, CONTEXT, **read)
    given = {"cache": context} if submit and "cache" in submit else submit or {}
    with (
        pytest.raises(kvjax.UsageError, match=sentence),
        kvjax.Engine(tiny_model, context=context, **SIZES | engine) as made,
    ):
        made.submit([5] * 90, **given).result(60)


def test_contexts_that_are_none(tiny_model):
    two = kvjax.read(tiny_model, [CONTEXT, CONTEXT])
    with pytest.raises(kvjax.UsageError, match="2 rows; give one"):
        kvjax.Engine(tiny_model, context=two)
    with pytest.raises(kvjax.UsageError, match="context="):
        kvjax.Engine(tiny_model, context="text")  # pyright: ignore[reportArgumentType]
    with pytest.raises(kvjax.UsageError, match="takes one cache, and a list was given"):
        kvjax.Engine(tiny_model, context=[two.row(0)])  # pyright: ignore[reportArgumentType]
    rounds = kvjax.read(tiny_model, CONTEXT, policy="round:watershed=1")
    with pytest.raises(kvjax.UsageError, match="slots do not share"):
        kvjax.Engine(tiny_model, context=rounds)  # pyright: ignore[reportArgumentType]
    longest = kvjax.read(tiny_model, [5] * tiny_model.config.max_position, policy="snapkv:ratio=0.25", once=True)
    with pytest.raises(kvjax.UsageError, match="model's is 512, so no prompt fits"):
        kvjax.Engine(tiny_model, context=longest)


@pytest.mark.parametrize("read", [{"policy": "snapkv:ratio=0.25", "once": True}, {}])
def test_a_turn_that_consumes_the_cache_leaves_the_engine_whole(tiny_model, read):
    context = kvjax.read(tiny_model, CONTEXT, **read)
    wanted = kvjax.generate(tiny_model, QUESTIONS[0], cache=context, max_new_tokens=5)
    with kvjax.Engine(tiny_model, context=context, **SIZES) as engine:
        kvjax.generate(tiny_model, QUESTIONS[1], cache=context, max_new_tokens=5, consume_cache=True)
        assert engine.submit(QUESTIONS[0], max_new_tokens=5).result(120).tokens == wanted.tokens
