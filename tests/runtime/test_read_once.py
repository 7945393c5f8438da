"""A context whose slots were chosen once: questions keep all of their own tokens, and share what was chosen."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from support.compiled import compiled_programs
from support.scorers import with_profiles

import kvjax
from kvjax.cache.host_memory import device_bytes, live_device_bytes
from kvjax.policies import SnapKV, parse
from kvjax.policies.base import selection
from kvjax.runtime.programs import Programs

RNG = np.random.default_rng(0)
CONTEXT = [int(x) for x in RNG.integers(3, 250, 203)]
QUESTIONS = [[int(x) for x in RNG.integers(3, 250, count)] for count in (5, 40, 1)]
#: Every policy that chooses when a prompt is read; the first ones are in the default suite.
CHOOSING = (
    "adaptive:inner=kvzip,scope=model",
    *("expected_attention", "snapkv", "adaptive:inner=kvzip", "pyramidkv", "slimkv", "nacl", "keydiff", "kvzip"),
    *("compactor", "finch", "qfilters", "learned", "chunkkv", "criticalkv", "merged", "adaptive"),
    *("razor:heads=0.0,ratio=0.6,inner=compactor", "razor:heads=0.0,ratio=0.6,inner=adaptive(inner=keydiff)"),
)


@dataclasses.dataclass(frozen=True)
class Apart(SnapKV):
    """SnapKV that keeps all later tokens, with room for them in every row: a copy of the context each."""

    def capacities(self, config, prompt, new):
        return ((prompt + new,) * config.num_kv_heads,) * config.num_layers

    def budgets(self, config, layer, total):
        return kvjax.Full().budgets(config, layer, total)

    def select(self, layer, cache, candidates, chunk):
        if chunk.fresh:
            return super().select(layer, cache, candidates, chunk)
        return selection(cache, candidates, candidates.valid)


def policy_of(text: str, config) -> kvjax.policies.Policy:
    sized = text if "ratio" in text else text + (",ratio=0.25" if ":" in text else ":ratio=0.25")
    return with_profiles(parse(sized), config)


def same(got, wanted, atol=1e-4) -> None:
    assert got.tokens == wanted.tokens
    np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=atol)
    assert got.stats.retained == wanted.stats.retained and got.stats.seen == wanted.stats.seen


def ask(lm, cache, questions=QUESTIONS, **more):
    return kvjax.generate(lm, questions, cache=cache, max_new_tokens=20, logprobs=True, **more)


@pytest.mark.parametrize("storage", ["model", "int8"])
def test_answers_are_those_of_rows_that_keep_everything_later(tiny_model, storage):
    context = kvjax.read(tiny_model, CONTEXT, policy="snapkv:ratio=0.25", once=True, storage=storage)
    apart = kvjax.read(tiny_model, CONTEXT, policy=Apart(ratio=0.25), storage=storage)
    got, wanted = ask(tiny_model, context), [ask(tiny_model, apart, question) for question in QUESTIONS]
    for one, other, question in zip(got, wanted, QUESTIONS, strict=True):
        if storage == "model":
            same(one, other)
        # int8 scales of the copies' keys follow the questions; what is held is the same.
        assert one.stats.retained == other.stats.retained
        same(one, ask(tiny_model, context, question), 1e-4 if storage == "model" else 0.05)
        assert set(np.ravel(one.stats.retained)) == {50 + len(question) + len(one.tokens) - 1}


@pytest.mark.parametrize(
    "name", [CHOOSING[0], CHOOSING[-1], *(pytest.param(name, marks=pytest.mark.slow) for name in CHOOSING[1:-1])]
)
def test_every_policy_that_chooses_shares_its_context(tiny_model, name):
    policy = policy_of(name, tiny_model.config)
    context = kvjax.read(tiny_model, CONTEXT, policy=policy, once=True)
    outputs = ask(tiny_model, context)
    alone = [ask(tiny_model, context, question) for question in QUESTIONS]
    for one, other in zip(outputs, alone, strict=True):
        same(one, other)
        assert one.cache.context is context.context and one.stats.shared_cache_bytes == context.context.nbytes
    # What was chosen is what the policy chooses without it, and it takes no more bytes.
    again = kvjax.read(tiny_model, CONTEXT, policy=policy)
    for ours, plain in zip(context.context.pools, again.pools, strict=True):
        np.testing.assert_array_equal(ours.length, plain.length)
    assert context.nbytes <= again.nbytes
    # And a later turn goes on with it.
    later = kvjax.generate(tiny_model, [7, 8], cache=outputs[1].cache, max_new_tokens=4, logprobs=True)
    assert later.cache.context is context.context
    assert later.stats.seen == outputs[1].stats.seen + 1 + 2 + 3


def test_a_policy_of_ones_own_is_kept_too(tiny_model):
    context = kvjax.read(tiny_model, CONTEXT, policy=Apart(ratio=0.25), once=True)
    for one, question in zip(ask(tiny_model, context), QUESTIONS, strict=True):
        same(one, ask(tiny_model, kvjax.read(tiny_model, CONTEXT, policy=Apart(ratio=0.25)), question))


@pytest.mark.slow
def test_windows_keep_their_rings(tiny_model):
    lm = toys.tiny_model(windows=(16, None, 16, None), num_layers=4)
    context = kvjax.read(lm, CONTEXT, policy="snapkv:ratio=0.25", once=True)
    apart = kvjax.read(lm, CONTEXT, policy=Apart(ratio=0.25))
    for one, question in zip(ask(lm, context), QUESTIONS, strict=True):
        same(one, ask(lm, apart, question))


def test_positions_count_under_alibi():
    lm = toys.tiny_model(positional="alibi")
    context = kvjax.read(lm, CONTEXT, policy="snapkv:ratio=0.25", once=True)
    apart = kvjax.read(lm, CONTEXT, policy=Apart(ratio=0.25))
    for one, question in zip(ask(lm, context), QUESTIONS, strict=True):
        same(one, ask(lm, apart, question))


@pytest.mark.parametrize(
    ("policy", "storage"),
    [
        ("snapkv:ratio=0.25", "model"),
        ("adaptive:ratio=0.25,inner=kvzip", "int8"),
        pytest.param("adaptive:ratio=0.25,inner=keydiff,scope=model", "int8", marks=pytest.mark.slow),
        pytest.param("snapkv:ratio=0.25", "int8", marks=pytest.mark.slow),
        pytest.param("adaptive:ratio=0.25,inner=kvzip", "model", marks=pytest.mark.slow),
    ],
)
def test_a_plan_is_what_is_allocated(tiny_model, policy, storage):
    context = kvjax.read(tiny_model, CONTEXT, policy=policy, once=True, storage=storage)
    request = {"prompt_tokens": 40, "context_tokens": 203, "max_new_tokens": 20, "policy": policy, "storage": storage}
    for rows in (1, 3):
        stats = ask(tiny_model, context, QUESTIONS[1:2] * rows)[0].stats
        plan = kvjax.plan(tiny_model, **request, batch=rows, once=True)
        assert (plan.cache_bytes, plan.context_bytes) == (stats.device_cache_bytes, stats.shared_cache_bytes)
        assert plan.retained == ((90,) * tiny_model.config.num_kv_heads,) * tiny_model.config.num_layers
        assert "all rows share" in plan.table()


def test_what_was_chosen_and_its_copy_are_counted_at_the_moment_when_both_are_there(monkeypatch):
    lm, live = toys.tiny_model(num_layers=56), []
    before = live_device_bytes() - device_bytes(jax.tree.leaves(lm.params))
    share_chosen = Programs.share_chosen

    def watched(programs, cache, **sizes):
        found = share_chosen(programs, cache, **sizes)
        live.append(live_device_bytes() - before)
        return found

    monkeypatch.setattr(Programs, "share_chosen", watched)
    read = {"policy": "snapkv:ratio=0.75", "once": True}
    kvjax.read(lm, CONTEXT, **read)
    assert live[0] > kvjax.plan(lm, prompt_tokens=203, max_new_tokens=1, policy=read["policy"]).total_bytes, "of no use"
    with pytest.raises(kvjax.DoesNotFit):
        kvjax.read(lm, CONTEXT, **read, memory_limit=live[0] - 1)
    planned = kvjax.plan(lm, prompt_tokens=1, context_tokens=203, max_new_tokens=1, **read)
    assert planned.total_bytes >= live[0]


def test_a_saved_context_is_shared_again(tiny_model, tmp_path):
    context = kvjax.read(tiny_model, CONTEXT, policy="snapkv:ratio=0.25", once=True)
    kvjax.save_cache(tmp_path / "saved", context, tiny_model)
    loaded = kvjax.load_cache(tmp_path / "saved", tiny_model)
    for one, other in zip(ask(tiny_model, loaded), ask(tiny_model, context), strict=True):
        same(one, other)
    parked = ask(tiny_model, context.to_host())
    same(parked[0], ask(tiny_model, context)[0])
    with pytest.raises(kvjax.UsageError, match="neither saved nor moved"):
        kvjax.save_cache(tmp_path / "more", parked[0].cache, tiny_model)


@pytest.mark.parametrize(
    "made",
    [{"num_layers": 8}, *(pytest.param(made, marks=pytest.mark.slow) for made in ({}, {"positional": "alibi"}))],
)
def test_layers_that_share_a_budget_share_a_context_too(made, tmp_path):
    """With a floor of all, what stays is what the inner policy keeps; read at once and layer by layer."""
    lm, whole = toys.tiny_model(**made), "adaptive:ratio=0.25,inner=keydiff,floor=1,scope=model"
    plain = ask(lm, kvjax.read(lm, CONTEXT, policy="keydiff:ratio=0.25", once=True))
    context = kvjax.read(lm, CONTEXT, policy=whole, once=True)
    for one, other in zip(ask(lm, context), plain, strict=True):
        same(one, other)
        assert one.cache.context is context.context and len(one.cache.layers) == lm.config.num_layers
    kvjax.save_cache(tmp_path / "saved", context, lm)
    loaded = kvjax.load_cache(tmp_path / "saved", lm)
    assert (loaded.live_nbytes, len(loaded.lengths)) == (context.live_nbytes, lm.config.num_layers)
    with kvjax.Engine(lm, slots=2, context=loaded) as engine:
        running = [engine.submit(question, max_new_tokens=20) for question in QUESTIONS]
        assert [each.result(60).tokens for each in running] == [each.tokens for each in plain]


def test_layers_hold_what_they_chose_together_and_every_later_token(tiny_model):
    policy = "adaptive:ratio=0.25,inner=keydiff,scope=model"
    chosen = kvjax.read(tiny_model, CONTEXT, policy=policy).lengths
    assert len({int(layer.sum()) for layer in chosen}) > 1, "layers hold equally many"
    context = kvjax.read(tiny_model, CONTEXT, policy=policy, once=True)
    for one, question in zip(ask(tiny_model, context), QUESTIONS, strict=True):
        later = len(question) + len(one.tokens) - 1
        np.testing.assert_array_equal(one.stats.retained, [layer[0] + later for layer in chosen])


def test_saved_contexts_are_no_batch(tiny_model, tmp_path):
    one = kvjax.read(tiny_model, CONTEXT, policy="snapkv:ratio=0.25", once=True)
    other = kvjax.read(tiny_model, CONTEXT[:150], policy="snapkv:ratio=0.25", once=True)
    loaded = []
    for i, cache in enumerate((one, other)):
        kvjax.save_cache(tmp_path / str(i), cache, tiny_model)
        loaded.append(kvjax.load_cache(tmp_path / str(i), tiny_model))
    for pair in (loaded, [one, loaded[1]], [loaded[0], other]):
        with pytest.raises(kvjax.UsageError, match="contexts of their own"):
            ask(tiny_model, pair, QUESTIONS[:2])
        with pytest.raises(kvjax.UsageError, match="contexts of their own"):
            kvjax.concatenate(pair)


def test_the_policy_of_such_a_cache_is_the_one_that_chose(tiny_model):
    context = kvjax.read(tiny_model, CONTEXT, policy="snapkv:ratio=0.25", once=True)
    again = kvjax.read(tiny_model, CONTEXT, policy=context.policy, once=True)
    assert again.policy == context.policy and parse(context.policy) == SnapKV(ratio=0.25)
    same(ask(tiny_model, again)[1], ask(tiny_model, context, policy=context.policy)[1])
    plain = [
        kvjax.generate(tiny_model, CONTEXT, policy=p, max_new_tokens=4) for p in (context.policy, SnapKV(ratio=0.25))
    ]
    assert plain[0].tokens == plain[1].tokens and plain[0].stats.retained == plain[1].stats.retained


@pytest.mark.slow
def test_a_conversation_over_it_keeps_its_programs(tiny_model):
    lm = toys.tiny_model(max_position=8192, hidden_size=16, intermediate_size=16)
    compiled = []
    with compiled_programs() as programs:
        cache = kvjax.read(lm, CONTEXT * 3, policy="snapkv:ratio=0.5", once=True)
        for turn in range(11):
            before = programs["decode_chunk"]
            more = {"max_new_tokens": 20, "stop_token_ids": (), "consume_cache": turn > 0}
            cache = kvjax.generate(lm, [65] * 50, cache=cache, **more).cache
            compiled.append(programs["decode_chunk"] - before)
    # What a row has for itself is 64 tokens, 256 and 768; the turns in between fit.
    assert not any(compiled[4:]), compiled


def test_a_chat_goes_on_with_it(tiny_model):
    context = kvjax.read(tiny_model, "A text to ask about. " * 8, policy="snapkv:ratio=0.5", once=True)
    chat = kvjax.Chat(tiny_model, max_new_tokens=6)
    chat.cache = context
    held = [chat.send(text).stats for text in ("one?", "two?", "three?")]
    assert len({stats.shared_cache_bytes for stats in held}) == 1 and held[0].shared_cache_bytes > 0
    kept = [np.min(stats.retained) for stats in held]
    seen = [stats.seen for stats in held]
    assert np.diff(kept).tolist() == np.diff(seen).tolist()


def test_nothing_of_the_context_is_copied_for_a_question(tiny_model):
    context = kvjax.read(tiny_model, CONTEXT, policy="snapkv:ratio=0.25", once=True)
    pools = [pool.kv for pool in context.context.pools]
    before = jax.tree.map(np.asarray, pools)
    outputs = ask(tiny_model, context)
    for output in outputs:
        assert [pool.kv for pool in output.cache.context.pools] == pools
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(pools), strict=True):
        np.testing.assert_array_equal(one, np.asarray(other))


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ("h2o:ratio=0.5", "goes on choosing"),
        ("lagkv:ratio=0.5", "goes on choosing"),
        ("streamingllm", "goes on choosing"),
        ("razor:heads=0.0", "goes on choosing"),
        ("razor:heads=0.0,inner=h2o", "goes on choosing"),
        ("adaptive:ratio=0.5,inner=h2o", "goes on choosing"),
        ("think", "among whole tokens of its heads"),
        ("round:watershed=1", "goes on choosing"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_it_is_read(tiny_model, policy, sentence):
    with pytest.raises(kvjax.UsageError, match=sentence):
        kvjax.read(tiny_model, CONTEXT, policy=policy, once=True)


def test_other_requests_that_make_no_sense(tiny_model):
    with pytest.raises(kvjax.UsageError, match="takes one text"):
        kvjax.read(tiny_model, [CONTEXT, CONTEXT], policy="snapkv:ratio=0.25", once=True)
    with pytest.raises(kvjax.UsageError, match="once is 'yes'"):
        kvjax.read(tiny_model, CONTEXT, policy="snapkv:ratio=0.25", once="yes")  # pyright: ignore[reportArgumentType]
    two = [kvjax.read(tiny_model, CONTEXT, policy="snapkv:ratio=0.25", once=True) for _ in range(2)]
    with pytest.raises(kvjax.UsageError, match="contexts of their own"):
        ask(tiny_model, two, QUESTIONS[:2])
    engine = kvjax.Engine(tiny_model, policy="snapkv:ratio=0.25", slots=1, prompt_tokens=256, new_tokens=8)
    with engine, pytest.raises(kvjax.UsageError, match="once=True"):
        engine.submit([1, 2], cache=two[0])


def test_full_shares_without_it(tiny_model):
    outputs = ask(tiny_model, kvjax.read(tiny_model, CONTEXT, once=True))
    wanted = ask(tiny_model, kvjax.read(tiny_model, CONTEXT))
    for one, other in zip(outputs, wanted, strict=True):
        same(one, other)
    assert jnp.all(outputs[0].cache.seen == wanted[0].cache.seen)
