"""What is read once and asked about later: token for token what ``context=`` gives, wherever the cache has been."""

from __future__ import annotations

import dataclasses

import pytest
import tokenizers
import toys
from support import oracles

import kvjax
from kvjax.cache.cache import NO_TOKEN, OPEN_MESSAGE
from kvjax.policies import parse
from kvjax.text.tokenizer import Tokenizer

CONTEXT = "The lighthouse of Alma stands on a rock. It was lit by hand until the keeper's daughter left the island."
QUESTIONS = ["Who left?", "What stands there, and on what?", "?"]
POLICIES = {
    "full": "full",
    "lagkv": "lagkv:ratio=0.5,lag=8,sink=4",
    "streamingllm": "streamingllm:window=40",
    "h2o": "h2o:budget=48",
    "rounds": "round:watershed=1,top=0.5",
    "rounds_of_snapkv": kvjax.RoundAttention(watershed=1, inner=kvjax.SnapKV(budget=32, window=4)),
}


def answers(lm, prompts, **options):
    return kvjax.generate(lm, prompts, max_new_tokens=8, logprobs=True, **options)


def same(found, wanted):
    assert [output.tokens for output in found] == [output.tokens for output in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.stats.retained == other.stats.retained and one.stats.seen == other.stats.seen


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_questions_get_the_answers_of_context(tiny_model, policy):
    cache = kvjax.read(tiny_model, CONTEXT, policy=policy)
    same(answers(tiny_model, QUESTIONS, cache=cache), answers(tiny_model, QUESTIONS, context=CONTEXT, policy=policy))
    # It is a value: nobody's question is in it.
    (alone,) = answers(tiny_model, QUESTIONS[1:2], cache=cache)
    same([alone], answers(tiny_model, QUESTIONS[1:2], context=CONTEXT, policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["model", "int8"])
def test_int8_rows_too(tiny_model, storage):
    cache = kvjax.read(tiny_model, CONTEXT, policy=POLICIES["lagkv"], storage=storage)
    assert cache.storage.kind == storage and cache.policy == parse(POLICIES["lagkv"])
    options = {"context": CONTEXT, "policy": POLICIES["lagkv"], "storage": storage}
    same(answers(tiny_model, QUESTIONS, cache=cache), answers(tiny_model, QUESTIONS, **options))


def test_no_turn_stands_between_what_was_read_and_the_question(tiny_model, monkeypatch):
    """The ids that the model reads are those of the one message that holds both."""
    from kvjax.runtime import prefill_batches

    fed: list[int] = []
    original = prefill_batches.read_prompts

    def spy(params, prompts, **options):
        fed.extend(prompts[0])
        return original(params, prompts, **options)

    monkeypatch.setattr(prefill_batches, "read_prompts", spy)
    system = {"role": "system", "content": "Be brief."}

    def asked(first, then) -> str:
        fed.clear()
        kvjax.generate(tiny_model, then, cache=kvjax.read(tiny_model, first), max_new_tokens=1)
        return tiny_model.tokenizer.decode(fed, False)

    def whole(messages) -> str:
        return tiny_model.tokenizer.decode(kvjax.chat_tokens(tiny_model, messages), False)

    assert asked("Text.", "Why?") == whole("Text.\n\nWhy?")
    assert asked([system, {"role": "user", "content": "Text."}], "Why?") == whole(
        [system, {"role": "user", "content": "Text.\n\nWhy?"}]
    )
    assert asked([system], "Why?") == whole([system, {"role": "user", "content": "Why?"}])
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    assert asked(talk, "Why?") == whole([*talk, {"role": "user", "content": "Why?"}])
    more = [*talk, {"role": "user", "content": "Text."}]
    assert asked(more, [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "As "}]) == whole(
        [*talk, {"role": "user", "content": "Text.\n\nWhy?"}, {"role": "assistant", "content": "As "}]
    )
    ids = [5, 6, 7]
    assert asked(ids, [8, 9]) == tiny_model.tokenizer.decode([5, 6, 7, 8, 9], False)


def test_an_answer_ends_the_open_message(tiny_model):
    """The second question is a turn of its own, as after ``context=``, and a chat goes on the same way."""
    cache = kvjax.read(tiny_model, CONTEXT)
    assert cache.next_token.tolist() == [OPEN_MESSAGE]
    first = kvjax.generate(tiny_model, QUESTIONS[0], cache=cache, max_new_tokens=4)
    nothing = kvjax.generate(tiny_model, QUESTIONS[0], cache=cache, max_new_tokens=0)
    assert nothing.cache.next_token.tolist() == [NO_TOKEN]
    wanted = kvjax.Chat(tiny_model, context=CONTEXT, max_new_tokens=4)
    chat = kvjax.Chat(tiny_model, max_new_tokens=4)
    chat.cache = cache
    for question in QUESTIONS:
        assert chat.send(question).tokens == wanted.send(question).tokens
    second = kvjax.generate(tiny_model, QUESTIONS[1], cache=first.cache, max_new_tokens=4)
    again = kvjax.Chat(tiny_model, context=CONTEXT, max_new_tokens=4)
    again.send(QUESTIONS[0])
    assert second.tokens == again.send(QUESTIONS[1]).tokens


@pytest.mark.slow
def test_several_texts_are_a_batch_of_rows(tiny_model):
    texts = [CONTEXT, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}], [1, 2, 3]]
    cache = kvjax.read(tiny_model, texts, policy=POLICIES["lagkv"])
    assert cache.batch == 3 and cache.next_token.tolist() == [OPEN_MESSAGE, NO_TOKEN, NO_TOKEN]
    together = answers(tiny_model, QUESTIONS, cache=cache)
    for row, text in enumerate(texts):
        alone = kvjax.read(tiny_model, text, policy=POLICIES["lagkv"])
        oracles.same_caches(cache.row(row), alone)
        same([together[row]], answers(tiny_model, QUESTIONS[row : row + 1], cache=alone))
    mixed = [kvjax.read(tiny_model, text, policy=POLICIES["lagkv"]) for text in texts]
    same(answers(tiny_model, QUESTIONS, cache=mixed), together)


@pytest.mark.slow
def test_several_texts_are_conversations_of_rounds(tiny_model):
    texts = [CONTEXT, CONTEXT[:40]]
    conversation = kvjax.read(tiny_model, texts, policy=POLICIES["rounds"])
    assert conversation.batch == 2 and conversation.next_token.tolist() == [OPEN_MESSAGE] * 2
    together = answers(tiny_model, QUESTIONS[:2], cache=conversation)
    for row, text in enumerate(texts):
        wanted = answers(tiny_model, QUESTIONS[row : row + 1], context=text, policy=POLICIES["rounds"])
        same([together[row]], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lagkv", "rounds"])
def test_it_comes_back_from_disk_and_from_host_memory(tiny_model, tmp_path, policy):
    cache = kvjax.read(tiny_model, CONTEXT, policy=POLICIES[policy])
    kvjax.save_cache(tmp_path / "read", cache, tiny_model)
    wanted = answers(tiny_model, QUESTIONS[:2], cache=cache)
    same(answers(tiny_model, QUESTIONS[:2], cache=kvjax.load_cache(tmp_path / "read", tiny_model)), wanted)
    same(answers(tiny_model, QUESTIONS[:2], cache=cache.to_host()), wanted)


def test_what_makes_no_sense_is_one_sentence(tiny_model):
    cache = kvjax.read(tiny_model, CONTEXT)
    with pytest.raises(kvjax.UsageError, match=r"ends within a user's message"):
        kvjax.generate(tiny_model, [{"role": "system", "content": "Be brief."}], cache=cache)
    with pytest.raises(kvjax.UsageError, match=r"ends within a user's message"):
        kvjax.generate(tiny_model, [{"role": "assistant", "content": "As "}], cache=cache)
    for text in ("", [], [""], 3, None, [[]], {"role": "user", "content": "x"}, [{"role": "user"}], [300], "x" * 600):
        with pytest.raises(kvjax.UsageError) as caught:
            kvjax.read(tiny_model, text)
        assert str(caught.value).endswith(".") and len(str(caught.value)) < 300
    with pytest.raises(kvjax.UsageError, match="Messages need the chat template"):
        kvjax.read(tiny_model, [{"role": "user", "content": "x"}], chat=False)
    with pytest.raises(kvjax.DoesNotFit, match=r"would fit|smaller model"):
        kvjax.read(tiny_model, CONTEXT, memory_limit=1000)
    with pytest.raises(kvjax.UsageError, match="was compressed by"):
        kvjax.generate(tiny_model, "Why?", cache=cache, policy="lagkv")
    with pytest.raises(kvjax.UsageError, match=r"from kvjax\.load"):
        kvjax.read(None, CONTEXT)


def test_plain_text_goes_on_as_plain_text(tiny_model):
    cache = kvjax.read(tiny_model, CONTEXT, chat=False)
    found = answers(tiny_model, QUESTIONS, cache=cache, chat=False)
    same(found, answers(tiny_model, QUESTIONS, context=CONTEXT, chat=False))


def test_chat_tokens_are_what_generate_reads(tiny_model):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    ids = kvjax.chat_tokens(tiny_model, messages)
    assert tiny_model.tokenizer.decode(ids, False) == (
        "<|start|>system\nBe brief.<|end|>\n<|start|>user\nWhy?<|end|>\n<|start|>assistant\n"
    )
    assert ids == kvjax.chat_tokens(tiny_model, tuple(messages)) and isinstance(ids, list)
    asked = kvjax.generate(tiny_model, messages, max_new_tokens=6)
    assert kvjax.generate(tiny_model, ids, max_new_tokens=6).tokens == asked.tokens
    assert asked.stats.prompt_tokens == len(ids)
    assert kvjax.chat_tokens(tiny_model, "Why?") == kvjax.chat_tokens(tiny_model, messages[1:])
    for bad in ("", [], [1, 2], [messages, messages], ["a", "b"], None, 3, [{"role": "user"}]):
        with pytest.raises(kvjax.UsageError) as caught:
            kvjax.chat_tokens(tiny_model, bad)
        assert str(caught.value).endswith(".")
    with pytest.raises(kvjax.UsageError, match=r"from kvjax\.load"):
        kvjax.chat_tokens("smollm2", messages)


@pytest.mark.parametrize("chat", [False, True])
def test_ids_go_on_with_a_text_context_as_with_its_cache(chat):
    """With the token that begins texts, and within the message that the chat template makes of the context."""
    plain = toys.tiny_model()
    backend = tokenizers.Tokenizer.from_str(plain.tokenizer.to_json())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|unused|> $A", special_tokens=[("<|unused|>", backend.token_to_id("<|unused|>"))]
    )
    chats = {"chat_template": plain.tokenizer.chat_template, "special_tokens": plain.tokenizer.special_tokens}
    lm = dataclasses.replace(plain, tokenizer=Tokenizer(backend, **chats))
    context, ids, options = "hello world", [65, 66, 67], {"max_new_tokens": 5, "chat": chat}
    alone = kvjax.generate(lm, ids, context=context, **options)
    onto = kvjax.generate(lm, ids, cache=kvjax.read(lm, context, chat=chat), **options)
    both = kvjax.generate(lm, [ids, "abc"], context=context, **options)
    text = kvjax.generate(lm, "abc", context=context, **options)
    assert alone.tokens == onto.tokens == both[0].tokens and both[1].tokens == text.tokens
    if not chat:
        assert alone.stats.prompt_tokens == 1 + len(context) + 3
