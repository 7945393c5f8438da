"""A context that rows share: answers as if each held a copy of it, and its bytes once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.buckets import NEW_TOKENS, prompt_bucket
from kvjax.cache.cache import materialised
from kvjax.memory_needs import cache_bytes, shared_context_bytes
from kvjax.runtime import prefill_batches

RNG = np.random.default_rng(0)
#: Longer than one page and one partition; ends within both.
CONTEXT = [int(x) for x in RNG.integers(3, 250, 203)]
QUESTIONS = [[int(x) for x in RNG.integers(3, 250, count)] for count in (5, 40, 1)]

LAG = "lagkv:ratio=0.5,lag=16,sink=4"
#: Of every kind: whole pools, a part of each pool, one of two groups, both groups.
SHARING = [
    "full",
    LAG,
    "lagkv:budget=64,lag=16,sink=4",
    "lagkv:partition_ratio=0.25,lag=16,sink=4,prefill=chunked",
    "razor:heads=0.0+1.1,ratio=0.8",
    "lagkv:ratio=0.1,lag=128",
]
COPYING = ["h2o:budget=48", "streamingllm:window=40", "snapkv:budget=64", "keydiff:ratio=0.5"]


def answers(lm, questions=QUESTIONS, *, copied=False, monkeypatch, **request) -> list[kvjax.Output]:
    """What the model answers to the questions; ``copied``: every row with a context of its own, as if none shared."""
    request = {"max_new_tokens": 30, "logprobs": True, **request}
    with monkeypatch.context() as patch:
        if copied:
            patch.setattr(prefill_batches, "shares", lambda policy, storage: False)
        return kvjax.generate(lm, questions, **request)


def same(got: list[kvjax.Output], wanted: list[kvjax.Output]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert one.stats.retained == other.stats.retained and one.stats.seen == other.stats.seen


@pytest.mark.slow
@pytest.mark.parametrize("policy", SHARING)
def test_answers_are_those_of_copies(tiny_model, monkeypatch, policy):
    request = {"context": CONTEXT, "policy": policy, "monkeypatch": monkeypatch}
    got = answers(tiny_model, **request)
    same(got, answers(tiny_model, copied=True, **request))
    held = got[0].cache
    assert held.context is not None and got[0].stats.shared_cache_bytes == held.context.nbytes > 0


@pytest.mark.slow
def test_full_holds_the_context_once(tiny_model, monkeypatch):
    request = {"context": CONTEXT, "monkeypatch": monkeypatch}
    few, many = (answers(tiny_model, QUESTIONS[:1] * n, **request)[0].stats for n in (2, 5))
    own = (many.device_cache_bytes - few.device_cache_bytes) / 4  # 8 rows and 4
    assert many.shared_cache_bytes == few.shared_cache_bytes
    assert many.device_cache_bytes == many.shared_cache_bytes + 8 * own
    # A question's own is what it takes without a context, where nothing is spared for other requests.
    assert own == cache_bytes(tiny_model.config, kvjax.Full(), 1, prompt_bucket(5), NEW_TOKENS, jnp.float32)
    assert many.cache_bytes == own + many.shared_cache_bytes // 5 and many.live_cache_bytes < many.cache_bytes


@pytest.mark.slow
@pytest.mark.parametrize("policy", COPYING)
def test_policies_that_choose_again_copy(tiny_model, monkeypatch, policy):
    got = answers(tiny_model, context=CONTEXT, policy=policy, max_new_tokens=4, monkeypatch=monkeypatch)
    assert got[0].stats.shared_cache_bytes == 0 and got[0].cache.context is None
    plan = kvjax.plan(tiny_model, prompt_tokens=40, context_tokens=203, batch=3, policy=policy)
    assert not plan.shares_context and plan.context_bytes == 0 and "holds a copy" in plan.table()


@pytest.mark.slow
def test_int8_rows_copy(tiny_model, monkeypatch):
    got = answers(tiny_model, context=CONTEXT, storage="int8", max_new_tokens=4, monkeypatch=monkeypatch)
    assert got[0].cache.context is None
    assert not kvjax.plan(tiny_model, prompt_tokens=40, context_tokens=203, batch=3, storage="int8").shares_context


@pytest.mark.parametrize("policy", ["full", LAG, "razor:heads=0.0+1.1,ratio=0.8"])
def test_a_plan_is_what_is_allocated(tiny_model, monkeypatch, policy):
    got = answers(tiny_model, context=CONTEXT, policy=policy, max_new_tokens=4, monkeypatch=monkeypatch)[0].stats
    plan = kvjax.plan(tiny_model, prompt_tokens=40, context_tokens=203, batch=3, policy=policy, max_new_tokens=4)
    assert plan.shares_context and "all rows share" in plan.table()
    assert (plan.cache_bytes, plan.context_bytes) == (got.device_cache_bytes, got.shared_cache_bytes)


@pytest.mark.slow
def test_one_cache_under_many_questions_stays_a_value(tiny_model, monkeypatch):
    read = kvjax.generate(tiny_model, CONTEXT, policy=LAG, max_new_tokens=3).cache
    before = jax.tree.map(np.asarray, read)
    request = {"cache": read, "monkeypatch": monkeypatch}
    got = answers(tiny_model, **request)
    same(got, answers(tiny_model, copied=True, **request))
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(read), strict=True):
        np.testing.assert_array_equal(one, np.asarray(other))
    # Consumed, it is gone, and what was made of it is not.
    last = answers(tiny_model, **request, consume_cache=True)
    with pytest.raises(kvjax.UsageError, match="consumed"):
        answers(tiny_model, **request)
    again = kvjax.generate(tiny_model, [3, 4], cache=got[1].cache, max_new_tokens=4)
    assert again.tokens == kvjax.generate(tiny_model, [3, 4], cache=last[1].cache, max_new_tokens=4).tokens


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", LAG])
def test_rows_go_on_alone_and_together(tiny_model, monkeypatch, tmp_path, policy):
    request = {"context": CONTEXT, "policy": policy, "monkeypatch": monkeypatch}
    shared, copied = (answers(tiny_model, copied=copied, **request) for copied in (False, True))
    more = [[9, 8, 7], [6], [5, 4, 3, 2]]

    def on(outputs, caches=None):
        held = [output.cache for output in outputs] if caches is None else caches
        return kvjax.generate(tiny_model, more, cache=held, max_new_tokens=20, logprobs=True)

    wanted = on(copied)
    together = on(shared)
    same(together, wanted)
    assert together[0].cache.context is shared[0].cache.context is not None
    for row, output in enumerate(shared):
        alone = kvjax.generate(tiny_model, more[row], cache=output.cache, max_new_tokens=20, logprobs=True)
        same([alone], [wanted[row]])
    # Rows of different contexts are one batch too, and so are saved ones, and those that were in host memory.
    kvjax.save_cache(tmp_path / "saved", shared[1].cache, tiny_model)
    loaded = kvjax.load_cache(tmp_path / "saved", tiny_model)
    mixed = on(None, [shared[0].cache.to_host(), loaded, copied[2].cache])
    same(mixed, wanted)
    assert mixed[0].cache.context is None


@pytest.mark.slow
def test_a_row_on_its_own_holds_what_a_copy_does(tiny_model, monkeypatch):
    request = {"context": CONTEXT, "policy": LAG, "monkeypatch": monkeypatch}
    got, wanted = (answers(tiny_model, copied=copied, **request)[1].cache for copied in (False, True))
    whole = materialised(got)
    assert whole.live_nbytes == wanted.live_nbytes == got.live_nbytes
    for one, other in zip(whole.layers, wanted.layers, strict=True):
        np.testing.assert_array_equal(one.length, other.length)
        np.testing.assert_array_equal(one.state.static, other.state.static)
    assert jax.tree.structure(whole.layers[0].state) == jax.tree.structure(wanted.layers[0].state)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", LAG])
def test_own_rooms_grow(policy, monkeypatch):
    import toys

    lm = toys.tiny_model(max_position=2048)
    request = {"context": CONTEXT, "policy": policy, "max_new_tokens": 300, "monkeypatch": monkeypatch}
    got = answers(lm, QUESTIONS[:2], **request)
    same(got, answers(lm, QUESTIONS[:2], copied=True, **request))
    assert got[0].stats.generated_tokens == 300


def test_samples_of_one_question_share_its_context(tiny_model, monkeypatch):
    request = {"context": CONTEXT, "n": 3, "temperature": 1.0, "seed": 4, "monkeypatch": monkeypatch}
    got = answers(tiny_model, QUESTIONS[1], **request)
    same(got, answers(tiny_model, QUESTIONS[1], copied=True, **request))
    assert got[0].stats.shared_cache_bytes > 0


def test_a_limit_that_holds_the_context_once_is_enough(tiny_model, monkeypatch):
    sizes = {"prompt_tokens": 40, "context_tokens": 203, "batch": 3, "max_new_tokens": 2}
    padded = kvjax.plan(tiny_model, **sizes)
    plan = kvjax.plan(tiny_model, **sizes, memory_limit=padded.total_bytes - 1)
    request = {"context": CONTEXT, "max_new_tokens": 2, "monkeypatch": monkeypatch}
    answers(tiny_model, **request, memory_limit=plan.total_bytes)
    with pytest.raises(kvjax.DoesNotFit):
        answers(tiny_model, **request, memory_limit=plan.total_bytes - plan.context_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", LAG, SHARING[3], SHARING[4]])
def test_samples_share_a_long_prompt(tiny_model, monkeypatch, policy):
    """Read once; the answers are those of copies, and what is planned is what is allocated."""
    options = {"policy": policy, "n": 3, "temperature": 1.0, "seed": 4, "max_new_tokens": 30, "logprobs": True}
    copied = kvjax.generate(tiny_model, CONTEXT, **options)
    assert copied[0].stats.shared_cache_bytes == 0  # shorter than what is worth it
    monkeypatch.setattr("kvjax.request.SHARED_PROMPT", len(CONTEXT))
    got = kvjax.generate(tiny_model, CONTEXT, **options)
    same(got, copied)
    assert len({sample.tokens for sample in got}) > 1
    stats, parsed = got[0].stats, kvjax.policies.parse(policy)
    room = prompt_bucket(len(CONTEXT))
    own, shared = shared_context_bytes(tiny_model.config, parsed, 4, room, room, 0, NEW_TOKENS, jnp.float32)
    assert (stats.device_cache_bytes, stats.shared_cache_bytes) == (own + shared, shared)
    # A sample can be gone on with, and so can all of them.
    more = [[9, 8, 7]] * 3
    goes_on = [kvjax.generate(tiny_model, more, cache=[x.cache for x in found]) for found in (got, copied)]
    assert [x.tokens for x in goes_on[0]] == [x.tokens for x in goes_on[1]]


def test_samples_that_outgrow_their_room_still_share(monkeypatch):
    import toys

    lm = toys.tiny_model(max_position=2048)
    options = {"n": 2, "temperature": 1.0, "max_new_tokens": 300}
    copied = kvjax.generate(lm, CONTEXT, **options)
    monkeypatch.setattr("kvjax.request.SHARED_PROMPT", len(CONTEXT))
    got = kvjax.generate(lm, CONTEXT, **options)
    assert [x.tokens for x in got] == [x.tokens for x in copied] and len(got[0].tokens) == 300
    assert got[0].cache.context is not None


@pytest.mark.parametrize("how", [{"policy": "h2o:budget=48"}, {"storage": "int8"}])
def test_samples_that_may_not_share_copy(tiny_model, monkeypatch, how):
    monkeypatch.setattr("kvjax.request.SHARED_PROMPT", len(CONTEXT))
    got = kvjax.generate(tiny_model, CONTEXT, n=2, max_new_tokens=2, **how)
    assert got[0].stats.shared_cache_bytes == 0 and got[0].cache.context is None
