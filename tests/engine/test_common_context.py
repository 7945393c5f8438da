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
from kvjax.engine import many
from kvjax.engine.core import EngineCore
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


# --- more questions than fit together ----------------------------------------------------------------------------

MANY = [[int(x) for x in RNG.integers(3, 250, 3 + 2 * (i % 13))] for i in range(24)]
DRAWN = {"max_new_tokens": 9, "temperature": 1.0, "seed": 5, "logprobs": True}


def limit_of(lm, context, rows: int, **request) -> int:
    """Bytes with which so many questions fit, beside the cache that is asked."""
    held = context.nbytes - (0 if context.context is None else context.context.nbytes)
    sizes = {"prompt_tokens": 27, "context_tokens": 203, "max_new_tokens": 9}
    return kvjax.plan(lm, **sizes, batch=rows, **request).total_bytes + held


@pytest.mark.parametrize(
    ("policy", "once", "saved"),
    [
        ("snapkv:ratio=0.25", True, False),
        ("snapkv:ratio=0.25", True, True),
        pytest.param("full", False, False, marks=pytest.mark.slow),
        pytest.param("lagkv:ratio=0.5,lag=16,sink=4", False, False, marks=pytest.mark.slow),
    ],
)
def test_questions_that_do_not_fit_together_are_answered_as_in_smaller_calls(
    tiny_model, tmp_path, monkeypatch, policy, once, saved
):
    context = kvjax.read(tiny_model, CONTEXT, policy=policy, once=once)
    whole = kvjax.generate(tiny_model, MANY, cache=context, **DRAWN)
    if saved:
        kvjax.save_cache(tmp_path / "saved", context, tiny_model)
        context = kvjax.load_cache(tmp_path / "saved", tiny_model)
    limit, made = limit_of(tiny_model, context, 12, policy=policy, once=once), []
    with monkeypatch.context() as patch:
        patch.setattr(many, "EngineCore", lambda *given, **how: made.append(EngineCore(*given, **how)) or made[-1])
        few = kvjax.generate(tiny_model, MANY, cache=context, **DRAWN, memory_limit=limit)
    beside = context.nbytes - (0 if context.context is None else context.context.nbytes)
    assert made[0].sizes.total_bytes + beside <= limit, "the cache that is asked stays"
    for one, other in zip(few, whole, strict=True):
        assert one.tokens == other.tokens and one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert one.stats.retained == other.stats.retained and one.stats.seen == other.stats.seen
        assert one.stats.prompt_tokens == other.stats.prompt_tokens
    assert few[0].stats.device_cache_bytes < whole[0].stats.device_cache_bytes <= limit
    assert few[0].stats.shared_cache_bytes == whole[0].stats.shared_cache_bytes
    with pytest.raises(kvjax.UsageError, match="fewer prompts"):
        _ = few[0].cache
    # The cache stays a value, unless it is to be consumed.
    assert kvjax.generate(tiny_model, MANY[:1], cache=context, **DRAWN)[0].tokens == few[0].tokens
    kvjax.generate(tiny_model, MANY, cache=context, memory_limit=limit, consume_cache=True, **DRAWN)
    with pytest.raises(kvjax.UsageError, match="was consumed"):
        kvjax.generate(tiny_model, MANY[:1], cache=context, **DRAWN)


def test_stop_strings_end_rows_that_pass_through_slots(tiny_model):
    context = kvjax.read(tiny_model, CONTEXT, policy="snapkv:ratio=0.25", once=True)
    options = {"max_new_tokens": 30, "temperature": 1.0, "chat": False}
    plain = kvjax.generate(tiny_model, MANY, cache=context, **options)
    stop = next(char for output in plain for char in output.text[3:] if char.isalnum() and char.isascii())
    limit = limit_of(tiny_model, context, 12, policy="snapkv:ratio=0.25", once=True)
    wanted = kvjax.generate(tiny_model, MANY, cache=context, stop=stop, **options)
    few = kvjax.generate(tiny_model, MANY, cache=context, stop=stop, memory_limit=limit, **options)
    assert [(one.text, one.finish_reason) for one in few] == [(one.text, one.finish_reason) for one in wanted]
    assert "stop" in {one.finish_reason for one in few}


@pytest.mark.parametrize("read", [{"policy": "h2o:ratio=0.5"}, {"storage": "int8"}])
def test_what_no_engine_answers_says_how_many_to_ask(tiny_model, read):
    lm = tiny_model
    context = kvjax.read(lm, CONTEXT, **read)
    limit = limit_of(lm, context, 8, **read)
    with pytest.raises(
        kvjax.DoesNotFit, match=r"would fit; ask \d+ in a call, and the others in later ones\."
    ) as found:
        kvjax.generate(lm, MANY, cache=context, memory_limit=limit, max_new_tokens=4)
    together = int(str(found.value).split("; ask ")[1].split()[0])
    assert 0 < together == found.value.batch
    kvjax.generate(lm, MANY[:together], cache=context, memory_limit=limit, max_new_tokens=4)


def test_not_even_one_slot(tiny_model):
    context = kvjax.read(tiny_model, CONTEXT, policy="snapkv:ratio=0.25", once=True)
    with pytest.raises(kvjax.DoesNotFit, match="This needs"):
        kvjax.generate(tiny_model, MANY, cache=context, max_new_tokens=4, memory_limit=100_000)
