"""Later turns on one cache equal the whole conversation at once: tokens, chats, contexts and lists of caches."""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np
import pytest
import toys
from support import oracles

import kvjax
from kvjax import Chat, UsageError
from kvjax.cache.continuation import keys_and_values
from kvjax.cache.layout import platform_layout
from kvjax.options import GenerationOptions
from kvjax.policies import Full, LagKV, StreamingLLM
from kvjax.prompts import tokenize
from kvjax.request import Request

RNG = np.random.default_rng(1)
FIRST, SECOND, THIRD = (RNG.integers(0, 256, size).tolist() for size in (40, 9, 21))


def fed_ids(monkeypatch) -> list[tuple[int, ...]]:
    """Collects the ids of every prompt that is read, as ``read_prompts`` gets them."""
    from kvjax.runtime import prefill_batches

    collected: list[tuple[int, ...]] = []
    original = prefill_batches.read_prompts

    def spy(params, prompts, **options):
        collected.extend(tuple(ids) for ids in prompts)
        return original(params, prompts, **options)

    monkeypatch.setattr(prefill_batches, "read_prompts", spy)
    return collected


@pytest.mark.parametrize("ending", ["length", "stop id", "end of text", "stop string", "no tokens"])
def test_continuing_token_ids_is_one_prompt_of_everything(tiny_model, ending):
    options: dict = {"max_new_tokens": 12, "temperature": 1.0, "seed": 5}
    free = kvjax.generate(tiny_model, FIRST, **options)
    if ending == "stop id":
        options["stop_token_ids"] = [free.tokens[6]]
    elif ending == "end of text":
        tiny_model = dataclasses.replace(tiny_model, stop_token_ids=(free.tokens[6],))
    elif ending == "stop string":
        at = next(i for i in range(3, 11) if free.tokens[i] < 128)
        options["stop"] = bytes([free.tokens[at]]).decode()
    elif ending == "no tokens":
        options["max_new_tokens"] = 0
    first = kvjax.generate(tiny_model, FIRST, **options)
    assert first.finish_reason == ("length" if ending in ("length", "no tokens") else "stop")
    assert len(first.tokens) == {"length": 12, "no tokens": 0}.get(ending, len(first.tokens)) < 13
    second = kvjax.generate(tiny_model, SECOND, cache=first.cache, max_new_tokens=10, logprobs=True)
    third = kvjax.generate(tiny_model, THIRD, cache=second.cache, max_new_tokens=10, logprobs=True)
    whole = [*FIRST, *first.tokens, *SECOND]
    for output, ids in ((second, whole), (third, [*whole, *second.tokens, *THIRD])):
        tokens, logprobs = oracles.greedy(tiny_model, ids, len(output.tokens))
        assert output.tokens == tokens
        np.testing.assert_allclose(output.logprobs, logprobs, atol=2e-4)
        assert output.stats.seen == len(ids) + len(output.tokens) - 1


@pytest.mark.parametrize("ending", ["length", "stop", "no tokens", "stop string"])
def test_chat_turns_feed_what_the_template_writes_for_the_whole_conversation(tiny_model, ending, monkeypatch):
    fed = fed_ids(monkeypatch)
    tokenizer = tiny_model.tokenizer
    end = tokenizer.encode("<|end|>")[0]
    options: dict = {"max_new_tokens": 6}
    ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": "Hello, you."}]))
    answer = list(oracles.greedy(tiny_model, ids, 6)[0])
    if ending == "stop":
        # The model ends its answer itself: its third token is its end of text.
        tiny_model = dataclasses.replace(tiny_model, stop_token_ids=(end, answer[2]))
    elif ending == "no tokens":
        options["max_new_tokens"] = 0
    elif ending == "stop string":
        at = next((i for i, token in enumerate(answer) if token < 128), None)
        options["stop"] = [bytes([answer[at]]).decode()] if at is not None else ["zz"]
    chat = kvjax.Chat(tiny_model, **options)
    first = chat.send("Hello, you.")
    said = list(first.tokens)
    if first.finish_reason == "stop" and said[-1] in tiny_model.stop_token_ids:
        said = said[:-1]
    second = chat.send("And now?")
    everything = [*ids, *said]
    turn = tokenizer.encode("<|end|>\n<|start|>user\nAnd now?<|end|>\n<|start|>assistant\n")
    assert list(fed[0]) == ids
    assert [*fed[0], *first.tokens[:-1], *fed[1]] == [*everything, *turn]
    # The same as the template's own rendering, with the answer's bytes where a placeholder stands.
    rendered = tokenizer.render(
        [
            {"role": "user", "content": "Hello, you."},
            {"role": "assistant", "content": "ANSWER"},
            {"role": "user", "content": "And now?"},
        ]
    )
    before, after = (tokenizer.encode(part) for part in rendered.split("ANSWER"))
    assert [*before, *said, *after] == [*everything, *turn]
    wanted = oracles.greedy(tiny_model, [*everything, *turn], len(second.tokens))[0]
    assert second.tokens == wanted


def test_an_end_of_text_that_begins_the_templates_turn_is_fed_once(tiny_model, monkeypatch):
    fed = fed_ids(monkeypatch)
    end = tiny_model.tokenizer.encode("<|end|>")[0]
    # A model whose configuration forgets that its template's end token ends answers; the user names it.
    silent = dataclasses.replace(tiny_model, stop_token_ids=())
    cache = kvjax.generate(silent, "x", max_new_tokens=1).cache
    cache = cache.replace(next_token=np.array([end], np.int32))
    kvjax.generate(silent, "y", cache=cache, max_new_tokens=1)
    assert fed[1].count(end) == 2 and fed[1][0] == end and fed[1][1] != end


def test_an_assistants_last_message_is_the_beginning_of_the_answer(tiny_model, monkeypatch):
    fed = fed_ids(monkeypatch)
    decode = tiny_model.tokenizer.decode
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure, "}]
    output = kvjax.generate(tiny_model, messages, max_new_tokens=1)
    assert decode(fed[0], False) == "<|start|>user\nHi<|end|>\n<|start|>assistant\nSure, "
    kvjax.generate(tiny_model, messages, cache=output.cache, max_new_tokens=1)
    assert decode(fed[1][1:], False) == "<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\nSure, "
    kvjax.generate(tiny_model, messages[1:], cache=output.cache, max_new_tokens=1)
    assert decode(fed[2][1:], False) == "<|end|>\n<|start|>assistant\nSure, "
    kvjax.generate(tiny_model, messages, context="Facts.", max_new_tokens=1)
    assert [decode(ids, False) for ids in fed[3:]] == [
        "<|start|>user\nFacts.\n\n",
        "Hi<|end|>\n<|start|>assistant\nSure, ",
    ]


@pytest.mark.parametrize("policy", [Full(), LagKV(ratio=0.5, sink=4, lag=8)], ids=str)
def test_a_cache_is_a_value(tiny_model, policy):
    outputs = kvjax.generate(tiny_model, [FIRST, SECOND, THIRD], policy=policy, max_new_tokens=10)
    caches = [output.cache for output in outputs]
    before = [oracles.live(cache) for cache in caches]
    alone = [kvjax.generate(tiny_model, SECOND, cache=cache, max_new_tokens=8) for cache in caches]
    assert alone[0].tokens == kvjax.generate(tiny_model, SECOND, cache=caches[0], max_new_tokens=8).tokens
    # A list of caches, a prompt each; one cache under many prompts.
    listed = kvjax.generate(tiny_model, [SECOND] * 3, cache=caches, max_new_tokens=8)
    many = kvjax.generate(tiny_model, [SECOND, THIRD, SECOND], cache=caches[0], max_new_tokens=8)
    assert [output.tokens for output in listed] == [output.tokens for output in alone]
    assert many[0].tokens == many[2].tokens == alone[0].tokens
    for one, other in zip(listed, alone, strict=True):
        oracles.same_caches(one.cache, other.cache)
    for cache, values in zip(caches, before, strict=True):
        for x, y in zip(oracles.live(cache), values, strict=True):
            np.testing.assert_array_equal(x, y)
    consumed = kvjax.generate(tiny_model, SECOND, cache=caches[0], consume_cache=True, max_new_tokens=8)
    assert consumed.tokens == alone[0].tokens
    for use in (caches[0], [caches[0], caches[1], caches[2]]):
        prompts = SECOND if use is caches[0] else [SECOND] * 3
        with pytest.raises(kvjax.UsageError, match="consumed"):
            kvjax.generate(tiny_model, prompts, cache=use)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Full(), StreamingLLM(window=20)], ids=str)
def test_caches_of_unlike_allocations_continue_as_one_batch(tiny_model, policy):
    prompts = [RNG.integers(0, 256, size).tolist() for size in (300, 9)]  # buckets of 2,048 and 256
    caches = [kvjax.generate(tiny_model, p, policy=policy, max_new_tokens=5).cache for p in prompts]
    assert caches[0].prompt_capacity != caches[1].prompt_capacity
    alone = [kvjax.generate(tiny_model, THIRD, cache=cache, max_new_tokens=8) for cache in caches]
    together = kvjax.generate(tiny_model, [THIRD, THIRD], cache=caches, max_new_tokens=8)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        oracles.same_caches(one.cache, other.cache)


@pytest.mark.slow
def test_a_context_under_many_prompts_equals_separate_calls(tiny_model):
    context = bytes(RNG.integers(32, 127, 50).tolist()).decode()
    questions = ["What?", "Who is it that asks, and why?", "?"]
    policy = LagKV(ratio=0.5, sink=4, lag=8)
    together = kvjax.generate(tiny_model, questions, context=context, policy=policy, max_new_tokens=10)
    for question, output in zip(questions, together, strict=True):
        alone = kvjax.generate(tiny_model, question, context=context, policy=policy, max_new_tokens=10)
        assert alone.tokens == output.tokens
        oracles.same_caches(alone.cache, output.cache)
        assert output.stats.prompt_tokens == output.stats.seen - 9
    whole = kvjax.generate(tiny_model, f"{context}\n\n{questions[0]}", max_new_tokens=10)
    assert kvjax.generate(tiny_model, questions[0], context=context, max_new_tokens=10).tokens == whole.tokens
    ids = kvjax.generate(tiny_model, SECOND, context=FIRST, chat=False, max_new_tokens=10)
    assert ids.tokens == kvjax.generate(tiny_model, [*FIRST, *SECOND], max_new_tokens=10).tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [LagKV(ratio=0.5, sink=4, lag=8), LagKV(ratio=0.25, sink=4, lag=8, prefill="chunked"), StreamingLLM(budget=30)],
    ids=str,
)
def test_compressed_conversations_stay_within_their_capacity(tiny_model, policy):
    chat = kvjax.Chat(tiny_model, policy=policy, max_new_tokens=24, system="Be brief.")
    for _ in range(3):
        output = chat.send("word " * 6)
        assert chat.cache is not None
        for layer in chat.cache.layers:
            assert (np.asarray(layer.length) <= np.asarray(layer.slots)).all()
        stats = output.stats
        share = stats.retained[0][0] / stats.seen
    assert stats.seen > 180
    assert share < (0.3 if isinstance(policy, StreamingLLM) else policy.ratio + 0.1)
    assert stats.live_cache_bytes < stats.full_cache_bytes * (share + 0.01)


def test_streamed_turns_are_the_sent_ones_and_a_refused_turn_changes_nothing(tiny_model):
    sent, streamed = (kvjax.Chat(tiny_model, max_new_tokens=9, system="S") for _ in range(2))
    for text in ("one", "two"):
        output = sent.send(text)
        pieces = list(streamed.stream(text))
        assert pieces[-1].output.tokens == output.tokens
        assert "".join(piece.text for piece in pieces) == output.text
        assert sum((piece.tokens for piece in pieces), ()) == output.tokens
    before = streamed.cache
    for bad in ("", 7, "x" * 600):
        with pytest.raises(kvjax.UsageError):
            streamed.stream(bad)  # at the call, not at the first piece
    next(iter(streamed.stream("abandoned")))
    assert streamed.cache is before
    streamed.reset()
    assert streamed.cache is None
    for name in ("n", "cache", "chat", "tempratur"):
        with pytest.raises(kvjax.UsageError, match=name):
            kvjax.Chat(tiny_model, **{name: 1})


def test_a_context_opens_a_conversation(tiny_model, monkeypatch):
    fed = fed_ids(monkeypatch)
    chat = kvjax.Chat(tiny_model, context="Facts.", max_new_tokens=2)
    chat.send("a")
    chat.send("b")
    decode = tiny_model.tokenizer.decode
    assert [decode(ids, False) for ids in fed[:2]] == [
        "<|start|>user\nFacts.\n\n",
        "a<|end|>\n<|start|>assistant\n",
    ]
    assert "Facts" not in decode(fed[2], False)


def test_what_was_generated_is_not_templated_twice(tiny_model):
    found = tokenize(tiny_model, [[1, 2], "text"], context=None, chat=True, onto=True)
    assert found.templated == (False, True) and found.prompts[0] == (1, 2)
    assert tokenize(tiny_model, "text", context=None, chat=False, onto=True).templated == (False,)


def test_one_cache_under_many_prompts_is_counted_for_each_and_once_more(tiny_model):
    cache = kvjax.generate(tiny_model, FIRST, max_new_tokens=1).cache
    options = {"cache": cache, "max_new_tokens": 1}

    def fits(limit: int) -> bool:
        try:
            Request(tiny_model, [SECOND] * 3, GenerationOptions(memory_limit=limit, max_new_tokens=1), cache=cache)
        except kvjax.DoesNotFit:
            return False
        return True

    least = bisect.bisect_left(range(1 << 24), True, key=fits)
    outputs = kvjax.generate(tiny_model, [SECOND] * 3, memory_limit=least, **options)
    through_slots = kvjax.generate(tiny_model, [SECOND] * 3, memory_limit=least - 1, **options)
    assert [one.tokens for one in through_slots] == [one.tokens for one in outputs]
    with pytest.raises(kvjax.UsageError, match="left no cache"):
        _ = through_slots[0].cache
    weights = kvjax.plan(tiny_model, prompt_tokens=1).weights_bytes
    assert least >= weights + outputs[0].stats.device_cache_bytes + cache.nbytes


ROUNDS = "round:watershed=1"


def buffers(chat) -> list:
    """Keys and values of a chat's conversation, without taking hold of them."""
    return keys_and_values(chat._held.value)


@pytest.mark.parametrize("policy", [None, ROUNDS])
def test_a_turn_reuses_the_memory_that_nobody_else_holds(tiny_model, policy):
    chat, told = (kvjax.Chat(tiny_model, policy=policy, max_new_tokens=3) for _ in range(2))
    first = chat.send("one")
    told.send("one")
    old = buffers(chat)
    second = chat.send("two")
    assert all(leaf.is_deleted() for leaf in old)
    with pytest.raises(kvjax.UsageError, match="has gone on from here"):
        _ = first.cache
    # Read in time, it stays a value, however the chat goes on.
    told_second = told.send("two")
    kept = told_second.cache
    assert told_second.tokens == second.tokens
    third = [talk.send("three").tokens for talk in (chat, told)]
    messages = [{"role": "user", "content": "three"}]
    again = [kvjax.generate(tiny_model, messages, cache=kept, max_new_tokens=3).tokens for _ in range(2)]
    assert third == again
    kept = chat.cache  # and so does what the chat itself gave
    chat.send("four")
    assert int(kept.seen[0]) < int(chat.cache.seen[0]) and not any(leaf.is_deleted() for leaf in keys_and_values(kept))


@pytest.mark.parametrize(("policy", "storage"), [("streamingllm:budget=32", None), (None, "int8")])
def test_a_turn_that_could_not_be_undone_leaves_the_cache_a_value(tiny_model, policy, storage):
    chat = kvjax.Chat(tiny_model, policy=policy, storage=storage, max_new_tokens=3)
    chat.send("one")
    old = buffers(chat)
    chat.send("two")
    assert not any(leaf.is_deleted() for leaf in old)


FAILURES = {
    "in reading": ("kvjax.runtime.prefill_batches.spread", None),
    "while it selects": ("kvjax.rounds.turn._check_fits", ROUNDS),
    "in the first token": ("kvjax.session.Session._present", None),
    "while it answers": ("kvjax.session.Session._collect", None),
    "in closing": ("kvjax.rounds.closing._slice", ROUNDS),
    "at the end": ("kvjax.session.Session._stats", ROUNDS),
}


@pytest.mark.parametrize(("name", "policy"), FAILURES.values(), ids=FAILURES.keys())
@pytest.mark.parametrize("error", [KeyboardInterrupt, kvjax.DoesNotFit])
def test_a_turn_that_fails_leaves_the_conversation_as_it_was(tiny_model, monkeypatch, name, policy, error):
    chat, other = (kvjax.Chat(tiny_model, policy=policy, max_new_tokens=3) for _ in range(2))
    for talk in (chat, other):
        talk.send("one " * 20)
    before, old = oracles.live(chat._held.value.device_layers), buffers(chat)

    def fail(*_, **__):
        raise error("cut off")

    with monkeypatch.context() as patched:
        patched.setattr(name, fail)
        with pytest.raises(error):
            chat.send("two " * 20)
    assert all(leaf.is_deleted() for leaf in old)
    for one, same in zip(oracles.live(chat._held.value.device_layers), before, strict=True):
        np.testing.assert_array_equal(one, same)
    assert chat.send("and?").tokens == other.send("and?").tokens


@pytest.mark.parametrize("policy", [None, ROUNDS])
def test_an_abandoned_stream_gives_the_conversation_back(tiny_model, policy):
    chat, other = (kvjax.Chat(tiny_model, policy=policy, max_new_tokens=12) for _ in range(2))
    for talk in (chat, other):
        talk.send("one")
    pieces = chat.stream("abandoned")
    next(pieces)
    with pytest.raises(kvjax.UsageError, match="streamed turn of it is not done"):
        chat.send("two")
    pieces.close()
    assert chat.send("two").tokens == other.send("two").tokens
    # What waited while the conversation went on is refused.
    late, now = chat.stream("late"), chat.stream("now")
    list(now)
    with pytest.raises(kvjax.UsageError, match="has gone on from here"):
        next(late)


@pytest.mark.parametrize("policy", ["full", "streamingllm:window=64"])
def test_one_stream_at_a_time_moves_a_conversation_on(tiny_model, policy):
    """Of two that were begun from one state the later is refused, whether or not the policy's cache may be lent."""
    chat = Chat(tiny_model, policy=policy, max_new_tokens=4, stop_token_ids=[])
    for turns in range(2):
        first, second = chat.stream("first question"), chat.stream("second")
        list(first)
        seen = int(chat.cache.seen[0])
        with pytest.raises(UsageError, match="gone on"):
            list(second)
        assert int(chat.cache.seen[0]) == seen and chat.changes == turns + 1
    late = chat.stream("too late")
    chat.send("a turn in between")
    with pytest.raises(UsageError, match="gone on from here since the stream was made"):
        next(late)


def test_an_assigned_cache_goes_on_under_its_own_policy(tiny_model):
    cache = kvjax.read(tiny_model, "some text", policy="streamingllm:window=64", storage="int8")
    with pytest.raises(UsageError, match="compressed by streamingllm:window=64"):
        Chat(tiny_model, policy="lagkv:ratio=0.5").cache = cache
    with pytest.raises(UsageError, match="stored as int8"):
        Chat(tiny_model, storage="model").cache = cache
    with pytest.raises(UsageError, match="another model"):
        Chat(toys.tiny_model(num_layers=3)).cache = cache
    with pytest.raises(UsageError, match="an output's cache"):
        Chat(tiny_model).cache = "a folder"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UsageError, match="takes an output's cache; a list was given"):
        Chat(tiny_model).cache = [cache]  # pyright: ignore[reportAttributeAccessIssue]
    chat = Chat(tiny_model, max_new_tokens=3)
    chat.cache = cache
    assert chat.policy == cache.policy.chosen
    assert chat.send("hi").cache.policy == cache.policy


def test_a_saved_conversation_is_loaded_with_its_own_storage_alone(tiny_model, tmp_path):
    chat = Chat(tiny_model, storage="int8", max_new_tokens=3)
    chat.send("a")
    chat.save(tmp_path / "saved")
    with pytest.raises(UsageError, match="stored as int8"):
        Chat.load(tmp_path / "saved", tiny_model, storage="model")
    assert Chat.load(tmp_path / "saved", tiny_model, storage="int8", max_new_tokens=3).send("b").tokens


def test_a_conversation_is_one_row(tiny_model, tmp_path):
    """Several are refused where they are given, not at the next turn."""
    cache = kvjax.read(tiny_model, ["some text", "more"])
    kvjax.save_cache(tmp_path / "saved", cache, tiny_model)
    with pytest.raises(UsageError, match=r"has 2 rows and a conversation is one; give one, such as cache.row\(0\)"):
        Chat(tiny_model).cache = cache
    with pytest.raises(UsageError, match="has 2 rows and a conversation is one"):
        Chat.load(tmp_path / "saved", tiny_model)


def test_the_usual_layout_given_by_name_is_the_usual_storage(tiny_model):
    usual = kvjax.Storage(layout=platform_layout(tiny_model.config.head_dim))
    chat = Chat(tiny_model, storage=usual, max_new_tokens=3)
    chat.send("a")
    assert chat.send("b").tokens
    with pytest.raises(UsageError, match="headroom is for storage='int8'"):
        kvjax.Storage("model", headroom=2.0)
    roomy = Chat(tiny_model, storage=kvjax.Storage("int8", headroom=2.0), max_new_tokens=3)
    roomy.send("a")
    cache = roomy.send("b").cache
    with pytest.raises(UsageError, match=r"stored as Storage\(kind='int8', headroom=2.0"):
        kvjax.generate(tiny_model, "c", cache=cache, storage="int8")
