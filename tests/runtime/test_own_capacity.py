"""The capacity of rows beside a context that they share: decided once, counted beforehand, of few sizes."""

from __future__ import annotations

import random
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import toys
from support.compiled import compiled_programs

import kvjax
from kvjax.allocation import Allocation, allocations
from kvjax.cache.buckets import own_bucket, prompt_bucket
from kvjax.planning.request_shape import RequestShape
from kvjax.policies import Full

RNG = np.random.default_rng(0)


def ids(count: int) -> list[int]:
    return [int(x) for x in RNG.integers(3, 250, count)]


CONTEXT = ids(203)
#: (policy, chosen once, storage): whole pools, a part of each, one of two groups, and what was chosen once.
KINDS = [
    ("lagkv:ratio=0.5,lag=16,sink=4", False, "model"),
    ("razor:heads=0.0+1.1,ratio=0.8", False, "model"),
    ("snapkv:ratio=0.25", True, "model"),
    pytest.param("full", False, "model", marks=pytest.mark.slow),
    pytest.param("full", True, "model", marks=pytest.mark.slow),
    pytest.param("adaptive:ratio=0.25,inner=keydiff", True, "int8", marks=pytest.mark.slow),
    pytest.param("razor:heads=0.0,ratio=0.6,inner=compactor", True, "model", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def lm(tiny_model):
    """A toy with a context that a dozen turns do not fill; ``tiny_model`` sets how it is compiled."""
    return toys.tiny_model(max_position=2048)


@pytest.fixture
def checks(monkeypatch):
    """Everything that the memory check has counted, the last one last."""
    found, real = [], RequestShape.plan

    def plan(self, *given):
        found.append(real(self, *given))
        return found[-1]

    monkeypatch.setattr(RequestShape, "plan", plan)
    return found


def counted(checks, outputs):
    """The outputs, once the bytes that they have allocated were found to be what the check before them counted."""
    stats = outputs[0].stats if isinstance(outputs, list) else outputs.stats
    assert (stats.device_cache_bytes, stats.shared_cache_bytes) == (checks[-1].cache_bytes, checks[-1].context_bytes)
    assert stats.shared_cache_bytes > 0
    return outputs


@pytest.mark.parametrize(("policy", "once", "storage"), KINDS)
def test_later_turns_allocate_what_the_check_counts(lm, checks, policy, once, storage):
    context = kvjax.read(lm, CONTEXT, policy=policy, once=once, storage=storage)
    options = {"max_new_tokens": 4, "stop_token_ids": ()}
    first = counted(checks, kvjax.generate(lm, [ids(5), ids(40), ids(1)], cache=context, **options))
    cache = first[1].cache
    for length in (3, 90, 400, 7):
        cache = counted(checks, kvjax.generate(lm, ids(length), cache=cache, **options)).cache
    together = counted(checks, kvjax.generate(lm, [ids(70)] * 3, cache=[one.cache for one in first], **options))
    counted(checks, kvjax.generate(lm, ids(20), cache=together[0].cache, n=2, temperature=1.0, **options))
    # One whose capacity for an answer has grown keeps it.
    long = kvjax.generate(lm, ids(9), cache=together[2].cache, max_new_tokens=300, stop_token_ids=())
    counted(checks, kvjax.generate(lm, [ids(9)] * 2, cache=long.cache, **options))


@pytest.mark.parametrize(
    ("policy", "once"), [("snapkv:ratio=0.25", True), pytest.param("full", False, marks=pytest.mark.slow)]
)
def test_a_long_answer_takes_what_its_question_left_before_its_rows_grow(lm, policy, once):
    context, found = kvjax.read(lm, CONTEXT, policy=policy, once=once), []
    questions = [ids(70), ids(5)]
    for count, capacity, grown in ((443, 256, 0), (444, 1024, 1)):  # 256, and 186 that the longer question left
        options = {"max_new_tokens": count, "stop_token_ids": ()}
        with compiled_programs() as programs:
            found.append(kvjax.generate(lm, questions, cache=context, **options))
        cache, stats = found[-1][0].cache, found[-1][0].stats
        assert (cache.own_capacity, cache.new_capacity, programs["grow"]) == (256, capacity, grown)
        asked = {"prompt_tokens": 70, "context_tokens": 203, "batch": 2, "policy": policy, "once": once}
        plan = kvjax.plan(lm, **asked, max_new_tokens=count)
        assert (plan.cache_bytes, plan.context_bytes) == (stats.device_cache_bytes, stats.shared_cache_bytes)
    for one, other in zip(*found, strict=True):
        assert other.tokens[:443] == one.tokens


def test_scored_answers_are_in_the_bytes_that_the_check_counts(lm, checks, monkeypatch):
    context, made = kvjax.read(lm, CONTEXT, policy="snapkv:ratio=0.25", once=True), []
    real = kvjax.runtime.prefill_batches.read_prompts
    monkeypatch.setattr(
        "kvjax.scoring.read_prompts", lambda *given, **how: made.append(real(*given, **how)) or made[-1]
    )
    kvjax.score(lm, [ids(5), ids(40)], [ids(150), ids(3)], cache=context, chat=False)
    assert made[0][0].device_nbytes == checks[-1].cache_bytes


@pytest.mark.parametrize(("policy", "once"), [("lagkv:ratio=0.5,lag=16,sink=4", False), ("snapkv:ratio=0.25", True)])
def test_a_limit_of_what_is_counted_suffices_for_a_later_turn(lm, checks, policy, once):
    context = kvjax.read(lm, CONTEXT, policy=policy, once=once)
    options = {"max_new_tokens": 4, "stop_token_ids": ()}
    caches = [one.cache for one in kvjax.generate(lm, [ids(40)] * 3, cache=context, **options)]
    # What is given stays, and is joined; the context is one, however many rows have it.
    given = 2 * sum(cache.nbytes - cache.context.nbytes for cache in caches)
    limit, capacities = None, []
    while len(capacities) < 3:  # usual ones, smaller ones, and without rows of padding
        outputs = kvjax.generate(lm, [ids(90)] * 3, cache=caches, memory_limit=limit, **options)
        capacities.append(counted(checks, outputs)[0].cache.own_capacity)
        total = checks[-1].total_bytes + given
        assert limit is None or total <= limit
        kvjax.generate(lm, [ids(90)] * 3, cache=caches, memory_limit=total, **options)
        assert checks[-1].total_bytes + given == total
        limit = total - 1
    assert capacities == [512, 256, 192]
    with pytest.raises(kvjax.DoesNotFit, match="ask 2 in a call"):
        kvjax.generate(lm, [ids(90)] * 3, cache=caches, memory_limit=limit, **options)


def test_a_conversation_reserves_what_its_plan_says(lm):
    context = kvjax.read(lm, CONTEXT, policy="snapkv:ratio=0.25", once=True)
    asked = {"reserve_tokens": 600, "max_new_tokens": 4}
    output = kvjax.generate(lm, ids(40), cache=context, **asked)
    sizes = {"prompt_tokens": 40, "context_tokens": 203, "policy": "snapkv:ratio=0.25", "once": True}
    plan = kvjax.plan(lm, **sizes, **asked)
    assert output.stats.device_cache_bytes == plan.cache_bytes and output.cache.own_capacity == prompt_bucket(640)
    later = kvjax.generate(lm, ids(500), cache=output.cache, max_new_tokens=4)
    assert later.stats.device_cache_bytes == plan.cache_bytes


def test_rows_of_different_capacities_are_joined_in_the_larger_one(lm, checks):
    context = kvjax.read(lm, CONTEXT, policy="snapkv:ratio=0.25", once=True)
    options = {"max_new_tokens": 4, "stop_token_ids": ()}
    short, long = (kvjax.generate(lm, ids(count), cache=context, **options).cache for count in (5, 100))
    assert short.prompt_capacity == long.prompt_capacity and short.own_capacity < long.own_capacity
    for caches in ((short, long), (long, short)):
        counted(checks, kvjax.generate(lm, [ids(3)] * 2, cache=caches, **options))


def test_samples_of_a_long_prompt_reserve_nothing_and_are_counted_so(checks):
    lm = toys.tiny_model(max_position=4096)
    asked = {"n": 3, "temperature": 1.0, "max_new_tokens": 4, "stop_token_ids": ()}
    for reserve in (None, 600):
        outputs = kvjax.generate(lm, ids(1100), reserve_tokens=reserve, **asked)
        assert counted(checks, outputs)[0].cache.own_capacity == 0


@pytest.mark.parametrize("exact", [False, True])
def test_capacities_are_of_the_same_buckets_on_all_turns(exact):
    config = toys.tiny_config(max_position=8192)

    def own(rows, tokens, **more):
        return [(size.rows, size.own_capacity) for size in allocations(config, Full(), rows, 4000 + tokens, **more)]

    given = {"context": 4000, "exact": exact}
    assert own(3, 70, **given) == ([(3, 128)] if exact else [(4, 256), (3, 128)])
    held = SimpleNamespace(prompt_capacity=4608, new_capacity=1024, own_capacity=256)
    assert own(3, 256, held=held, **given) == ([(3, 256)] if exact else [(4, 256), (3, 256)])
    assert own(3, 257, held=held, **given) == ([(3, 512)] if exact else [(4, 768), (4, 512), (3, 512)])
    kept = allocations(config, Full(), 4, 4256, held=held, **given)
    assert kept == (Allocation(4, 4608, 1024, 256),)
    # No row is longer than the model's context.
    assert own(1, 4100, held=held, **given)[0] == (1, 4608)
    assert [own_bucket(count) for count in (1, 64, 65, 256, 257, 3000)] == [64, 64, 256, 256, 512, 3072]


# --- rows of padding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "once", "storage"), KINDS)
def test_rows_of_padding_change_nothing(lm, policy, once, storage):
    context = kvjax.read(lm, CONTEXT, policy=policy, once=once, storage=storage)
    questions = [ids(count) for count in (5, 40, 1, 9, 64)]
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "logprobs": True, "stop_token_ids": ()}

    def ask(count):
        return kvjax.generate(lm, questions[:count], cache=context, **options)

    three, four = ask(3), ask(4)
    for one, other in zip(three, four, strict=False):
        assert (one.tokens, one.logprobs, one.text) == (other.tokens, other.logprobs, other.text)
        assert one.stats.retained == other.stats.retained and one.stats.seen == other.stats.seen
        for held, there in zip(jax.tree.leaves(one.cache), jax.tree.leaves(other.cache), strict=True):
            np.testing.assert_array_equal(held, there)
    five = ask(5)
    assert [one.tokens for one in five[:4]] == [one.tokens for one in four]
    assert {one.cache.batch for one in five} == {1}
    # Bytes: those of four rows, and then of eight, of which the context is an equal part of every answer's alone.
    shared = four[0].stats.shared_cache_bytes
    assert context.context is None or shared == context.context.nbytes
    for outputs, rows in ((three, 4), (four, 4), (five, 8)):
        stats = outputs[0].stats
        assert stats.shared_cache_bytes == shared
        assert stats.cache_bytes == (stats.device_cache_bytes - shared) // rows + shared // len(outputs)
        asked = {"prompt_tokens": max(map(len, questions[: len(outputs)])), "context_tokens": 203, "once": once}
        plan = kvjax.plan(lm, **asked, batch=len(outputs), policy=policy, storage=storage, max_new_tokens=12)
        assert (plan.cache_bytes, plan.context_bytes) == (stats.device_cache_bytes, shared)
        assert plan.spare_bytes > 0
    live = [one.cache.live_nbytes - one.cache.context.live_nbytes for one in three]
    assert [one.stats.live_cache_bytes - own for one, own in zip(three, live, strict=True)] == [
        four[0].cache.context.live_nbytes // 3
    ] * 3


@pytest.mark.parametrize("layers", [2, 8])
def test_one_to_eight_questions_share_twelve_programs(tiny_model, layers):
    """One that reads and one that decodes, for each of three sizes of a batch and two of a question."""
    lm = toys.tiny_model(max_position=2048, num_layers=layers, hidden_size=16, intermediate_size=16)
    context = kvjax.read(lm, CONTEXT, policy="snapkv:ratio=0.25", once=True)
    draw = random.Random(5)
    with compiled_programs() as programs:
        for i in range(40):
            rows, most = draw.randint(1, 8), draw.choice([64, 200])
            questions = [ids(draw.randint(5, most)) for _ in range(rows)]
            kvjax.generate(lm, questions, cache=context, max_new_tokens=2, logprobs=i % 2 == 0)
        decoders = programs["decode_chunk"]
        # Rows are taken of the context's by a program a size of a batch.
        rest = sum(programs.values()) - programs["rows"]
    assert decoders <= 6 and rest <= 12 and programs["rows"] <= 3, programs


def test_where_padding_does_not_fit_there_is_none(lm):
    context = kvjax.read(lm, CONTEXT, policy="snapkv:ratio=0.25", once=True)
    asked = {"prompt_tokens": 40, "context_tokens": 203, "policy": "snapkv:ratio=0.25", "once": True}
    plan = kvjax.plan(lm, **asked, batch=5, max_new_tokens=4)
    limit = plan.total_bytes - 1
    exact = kvjax.plan(lm, **asked, batch=5, max_new_tokens=4, memory_limit=limit)
    assert exact.cache_bytes < plan.cache_bytes and exact.spare_bytes < plan.spare_bytes
    outputs = kvjax.generate(lm, [ids(40)] * 5, cache=context, max_new_tokens=4, memory_limit=limit)
    assert outputs[0].stats.device_cache_bytes == exact.cache_bytes
