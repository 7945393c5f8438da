"""Generation on a tiny model against plain re-implementations: greedy, drawn, batched, grown."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import toys
from support import oracles

import kvjax
from kvjax import UsageError, session
from kvjax.cache.buckets import NEW_TOKENS
from kvjax.cache.continuation import is_consumed
from kvjax.policies import Full, LagKV, StreamingLLM
from kvjax.runtime.compilation import compile_clock

RNG = np.random.default_rng(0)
LONG, SHORT, MIDDLE = (RNG.integers(0, 256, size).tolist() for size in (61, 7, 30))

POLICIES = [
    Full(),
    StreamingLLM(sink=4, window=20),
    StreamingLLM(ratio=0.5, positions="cache"),
    LagKV(ratio=0.5, sink=4, lag=8),
    LagKV(partition_ratio=0.25, sink=4, lag=8, variant="local", prefill="chunked"),
]


def test_greedy_is_the_argmax_of_the_whole_sequence_and_logprobs_its_log_softmax(tiny_model):
    tokens, logprobs = oracles.greedy(tiny_model, MIDDLE, 40, penalty=1.5)
    output = kvjax.generate(tiny_model, MIDDLE, max_new_tokens=40, repetition_penalty=1.5, logprobs=True)
    assert len(set(tokens)) > 8  # the penalty makes the sequence worth comparing
    assert output.tokens == tokens and output.finish_reason == "length"
    np.testing.assert_allclose(output.logprobs, logprobs, atol=1e-4)
    plain, _ = oracles.greedy(tiny_model, MIDDLE, 10)
    assert kvjax.generate(tiny_model, MIDDLE, max_new_tokens=10).tokens == plain


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_row_of_a_batch_is_the_row_alone_whenever_the_others_end(tiny_model, policy):
    prompts = [LONG, SHORT, MIDDLE]
    options = dict(policy=policy, max_new_tokens=60, repetition_penalty=1.5)
    free = [kvjax.generate(tiny_model, prompt, **options) for prompt in prompts]
    # A stop id of the second row's middle and one of the third row's end: rows end at three different times.
    stops = dict(stop_token_ids=[free[1].tokens[21], free[2].tokens[50]])
    alone = [kvjax.generate(tiny_model, prompt, **options, **stops) for prompt in prompts]
    together = kvjax.generate(tiny_model, prompts, **options, **stops)
    assert len({len(output.tokens) for output in alone}) > 1
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens and one.finish_reason == other.finish_reason and one.text == other.text
        assert one.stats.retained == other.stats.retained and one.stats.seen == other.stats.seen
        oracles.same_caches(one.cache, other.cache)


@pytest.mark.slow
def test_a_row_that_ended_due_for_compression_stays_as_it_was(tiny_model):
    options = dict(policy=LagKV(ratio=0.5, sink=4, lag=8), max_new_tokens=60, repetition_penalty=1.5)
    free = kvjax.generate(tiny_model, LONG[:23], **options).tokens
    other = kvjax.generate(tiny_model, MIDDLE, **options).tokens
    for last in range(5, 50):
        if free[last] in free[:last] or free[last] in other[: last + 20]:
            continue
        stops = dict(stop_token_ids=[free[last]])
        alone = kvjax.generate(tiny_model, LONG[:23], **options, **stops)
        layer = alone.cache.layers[-1]
        if int(layer.length[0, 0] - layer.state.static[0]) == 16:  # two partitions: the next step would compress
            break
    else:
        pytest.fail("no step of this seed ends a row when it is due")
    together = kvjax.generate(tiny_model, [LONG[:23], MIDDLE, MIDDLE], **options, **stops)
    assert together[0].tokens == alone.tokens and len(together[1].tokens) > len(alone.tokens) + 16
    oracles.same_caches(alone.cache, together[0].cache)


def test_temperature_draws_from_the_softmax(tiny_model):
    # Row i, sample j draw by (seed, i, j): 512 samples are 512 independent draws.
    logits = oracles.next_logits(tiny_model, SHORT) / 0.7
    wanted = np.exp(logits - logits.max())
    wanted /= wanted.sum()
    outputs = [
        o for s in (1, 2) for o in kvjax.generate(tiny_model, SHORT, n=256, seed=s, temperature=0.7, max_new_tokens=1)
    ]
    counts = np.bincount([o.tokens[0] for o in outputs], minlength=wanted.size)
    best = np.argsort(-wanted)[:20]
    expected = np.append(wanted[best], 1 - wanted[best].sum()) * 512
    found = np.append(counts[best], 512 - counts[best].sum())
    chi = float(((found - expected) ** 2 / expected).sum())
    assert chi < 46  # 20 degrees of freedom: p = 0.001


def test_draws_depend_on_seed_row_and_sample_and_on_nothing_else(tiny_model):
    options = dict(temperature=1.0, max_new_tokens=8, policy="lagkv:ratio=0.5,sink=4,lag=8")
    pair = kvjax.generate(tiny_model, [LONG, SHORT, MIDDLE], **options)
    other = kvjax.generate(tiny_model, [MIDDLE, SHORT, SHORT], **options)
    assert pair[1].tokens == other[1].tokens  # whatever the neighbours are
    assert other[1].tokens != other[2].tokens  # the same prompt in another row
    assert kvjax.generate(tiny_model, [LONG, SHORT, MIDDLE], **options)[0].tokens == pair[0].tokens
    assert kvjax.generate(tiny_model, [LONG, SHORT, MIDDLE], seed=1, **options)[0].tokens != pair[0].tokens


def test_samples_are_lists_of_different_answers(tiny_model):
    options = dict(temperature=1.0, max_new_tokens=8)
    nested = kvjax.generate(tiny_model, [SHORT, MIDDLE], n=2, **options)
    assert [len(samples) for samples in nested] == [2, 2]
    assert len({output.tokens for samples in nested for output in samples}) == 4
    single = kvjax.generate(tiny_model, SHORT, n=4, **options)
    assert len({output.tokens for output in single}) == 4
    assert single[0].tokens == nested[0][0].tokens and single[1].tokens == nested[0][1].tokens
    greedy = kvjax.generate(tiny_model, SHORT, n=4, max_new_tokens=8)
    assert len({output.tokens for output in greedy}) == 1
    again = kvjax.generate(tiny_model, "more", n=4, cache=single[3].cache, chat=False, **options)
    assert len({output.tokens for output in again}) == 4
    assert isinstance(kvjax.generate(tiny_model, [SHORT], **options), list)


@pytest.mark.parametrize("policy", [Full(), LagKV(ratio=0.5, sink=4, lag=64)], ids=str)
def test_growing_past_the_first_room_changes_nothing(policy, monkeypatch):
    lm = dataclasses.replace(toys.tiny_model(max_position=1024), stop_token_ids=())
    options = dict(policy=policy, max_new_tokens=550, repetition_penalty=1.3)
    grown = kvjax.generate(lm, SHORT, **options)
    sizes = kvjax.request.fitting

    def larger(*args, **kinds):
        return dataclasses.replace(sizes(*args, **kinds), new_capacity=1024)

    monkeypatch.setattr("kvjax.request.fitting", larger)
    roomy = kvjax.generate(lm, SHORT, **options)
    assert roomy.cache.new_capacity == grown.cache.new_capacity == 1024
    assert len(grown.tokens) == 550 and grown.tokens == roomy.tokens
    oracles.same_caches(grown.cache, roomy.cache)
    planned = kvjax.plan(lm, prompt_tokens=len(SHORT), policy=policy, max_new_tokens=550)
    assert planned.cache_bytes == grown.cache.nbytes


def test_the_plan_grows_exactly_when_generation_does(tiny_model):
    # The last token is never fed: 506 tokens are 505, which with the prompt's 7 fill buckets of 256 and 256.
    lm = dataclasses.replace(toys.tiny_model(max_position=700), stop_token_ids=())
    for new, grows in ((506, False), (507, True)):
        output = kvjax.generate(lm, SHORT, max_new_tokens=new)
        assert (output.cache.new_capacity > NEW_TOKENS) is grows
        assert kvjax.plan(lm, prompt_tokens=7, max_new_tokens=new).cache_bytes == output.cache.nbytes
    # There is never room for more than the context, which ends a row.
    limit = lm.config.max_position
    output = kvjax.generate(lm, SHORT, max_new_tokens=10 * limit)
    assert output.finish_reason == "context" and output.cache.new_capacity == limit < 4 * NEW_TOKENS
    assert kvjax.plan(lm, prompt_tokens=7, max_new_tokens=10 * limit).cache_bytes == output.cache.nbytes


def test_an_answer_whose_cache_would_outgrow_the_memory_ends_with_what_there_is():
    lm = toys.tiny_model(num_layers=8, max_position=1024)
    small, large = (kvjax.plan(lm, prompt_tokens=4, max_new_tokens=count) for count in (200, 600))
    # While it grows, the cache is there twice.
    enough = small.weights_bytes + small.cache_bytes + large.cache_bytes
    whole, cut = (
        kvjax.generate(lm, [1, 2, 3, 4], max_new_tokens=600, stop_token_ids=(), memory_limit=limit)
        for limit in (enough, enough - 1)
    )
    assert whole.finish_reason == "length" and len(whole.tokens) == 600
    assert cut.finish_reason == "memory" and cut.tokens == whole.tokens[: len(cut.tokens)]
    assert len(cut.tokens) >= NEW_TOKENS and cut.cache.nbytes == small.cache_bytes


def test_generation_ends_where_the_context_does(tiny_model):
    limit = tiny_model.config.max_position
    prompt = (LONG * 9)[: limit - 5]
    output = kvjax.generate(tiny_model, prompt, max_new_tokens=50)
    # The last token comes from the last position and is itself beyond it.
    assert output.finish_reason == "context" and output.stats.seen == limit and len(output.tokens) == 6
    assert kvjax.generate(tiny_model, prompt, max_new_tokens=6).finish_reason == "length"
    with pytest.raises(kvjax.UsageError, match="context is 512"):
        kvjax.generate(tiny_model, "and", cache=output.cache, chat=False)


@pytest.mark.slow
def test_renumbered_positions_run_past_the_context_over_turns(tiny_model):
    policy = StreamingLLM(sink=4, window=20, positions="cache")
    output = kvjax.generate(tiny_model, MIDDLE, policy=policy, max_new_tokens=600)
    assert output.finish_reason == "length" and output.stats.seen == 30 + 599
    kvjax.generate(tiny_model, SHORT, cache=output.cache, max_new_tokens=2)
    with compile_clock() as clock:
        for _ in range(3):
            output = kvjax.generate(tiny_model, SHORT, cache=output.cache, max_new_tokens=100)
    assert output.stats.seen == 629 + 3 * 107 and output.finish_reason == "length"
    assert output.stats.retained == ((24, 24), (24, 24))
    assert clock.programs == 0  # a bounded cache keeps its shapes however long the conversation


@pytest.mark.parametrize("policy", POLICIES[:4], ids=str)
def test_stats_agree_with_each_other_and_with_the_cache(tiny_model, policy):
    outputs = kvjax.generate(tiny_model, [LONG, SHORT, MIDDLE], policy=policy, max_new_tokens=30)
    config = tiny_model.config
    for prompt, output in zip([LONG, SHORT, MIDDLE], outputs, strict=True):
        stats, cache = output.stats, output.cache
        assert stats.prompt_tokens == len(prompt) and stats.generated_tokens == len(output.tokens) == 30
        assert stats.seen == int(cache.seen[0]) == len(prompt) + 29
        assert stats.retained == tuple(tuple(np.asarray(layer.length)[0].tolist()) for layer in cache.layers)
        slot = 2 * config.head_dim * 4
        assert stats.live_cache_bytes == cache.live_nbytes == slot * sum(map(sum, stats.retained))
        assert stats.live_cache_bytes <= stats.cache_bytes == cache.nbytes
        assert stats.full_cache_bytes == slot * config.num_layers * config.num_kv_heads * stats.seen
        assert stats.time_to_first_token >= stats.prompt_seconds > 0
        assert stats.prompt_tokens_per_second == pytest.approx(98 / stats.prompt_seconds)
        assert stats.decode_tokens_per_second == pytest.approx(3 * 29 / stats.decode_seconds)


def test_no_new_tokens_reads_the_prompt_and_returns_the_cache(tiny_model):
    output = kvjax.generate(tiny_model, MIDDLE, max_new_tokens=0, logprobs=True)
    assert (output.text, output.tokens, output.logprobs, output.finish_reason) == ("", (), (), "length")
    assert output.stats.seen == 30 and int(output.cache.next_token[0]) == -1
    many = kvjax.generate(tiny_model, [MIDDLE, SHORT], n=2, max_new_tokens=0)
    assert [[o.stats.seen for o in samples] for samples in many] == [[30, 30], [7, 7]]


def test_caches_that_are_joined_are_consumed_where_that_is_asked(tiny_model):
    options = {"chat": False, "max_new_tokens": 3}
    first, second = (kvjax.generate(tiny_model, text, **options).cache for text in ("abc", "abcd"))
    kept = [output.tokens for output in kvjax.generate(tiny_model, ["q", "r"], cache=[first, second], **options)]
    assert not is_consumed(first) and not is_consumed(second)
    outputs = kvjax.generate(tiny_model, ["q", "r"], cache=[first, second], consume_cache=True, **options)
    assert [output.tokens for output in outputs] == kept
    assert is_consumed(first) and is_consumed(second)
    with pytest.raises(UsageError, match="consumed by an earlier call"):
        kvjax.generate(tiny_model, "q", cache=first, **options)


def test_a_special_token_among_the_stop_strings_ends_an_answer(tiny_model):
    options = {"max_new_tokens": 30, "temperature": 1.0, "seed": 0}
    special = tiny_model.tokenizer.id_of("<|unused|>")
    whole = kvjax.generate(tiny_model, [1, 2, 3], **options)
    assert special in whole.tokens, "the draws of this seed hold it"
    ended = whole.tokens[: whole.tokens.index(special) + 1]
    for stop in ("<|unused|>", ["never", "<|unused|>"]):
        output = kvjax.generate(tiny_model, [1, 2, 3], stop=stop, **options)
        assert output.tokens == ended and output.finish_reason == "stop"
    with kvjax.Engine(tiny_model, slots=1) as engine:
        assert engine.submit([1, 2, 3], stop="<|unused|>", **options).result().tokens == ended
    with pytest.raises(UsageError, match="which adds no text to an answer"):
        kvjax.generate(tiny_model, [1, 2, 3], stop="x<|unused|>", **options)


@pytest.mark.slow
def test_prompts_through_slots_say_what_best_became(tiny_model):
    prompts = ["a" * 200, "b" * 300, "c" * 100, "d" * 250] * 2
    options = {"policy": "best:ratio=0.25", "max_new_tokens": 4}
    together = kvjax.generate(tiny_model, prompts, **options)[0].stats
    apart = kvjax.generate(tiny_model, prompts, **options, memory_limit=10_000_000)[0].stats
    assert apart.choice == together.choice is not None


def test_memory_of_before_that_is_freed_during_a_call_hides_none_of_its_own(tiny_model, monkeypatch):
    before, prefill = [jnp.zeros((1_000_000,), jnp.float32)], session.Session.prefill

    def freeing(self, *args, **options):
        before.clear()
        prefill(self, *args, **options)

    kept = kvjax.generate(tiny_model, SHORT, max_new_tokens=2).stats.device_peak_bytes
    monkeypatch.setattr(session.Session, "prefill", freeing)
    freed = kvjax.generate(tiny_model, SHORT, max_new_tokens=2).stats.device_peak_bytes
    assert kept == freed > 0
