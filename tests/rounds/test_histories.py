"""Histories and chats of rounds on a tiny model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.round_talks import BELOW

import kvjax
from kvjax.cache.pool import keys_and_values
from kvjax.policies import RoundAttention


@pytest.mark.slow
def test_a_history_is_the_conversation_that_was_held(lm):
    from kvjax import read_history

    tokenizer = lm.tokenizer
    messages = [
        {"role": role, "content": f"{role} {turn}. " * 5} for turn in range(3) for role in ("user", "assistant")
    ]
    policy = RoundAttention(watershed=BELOW)
    read = read_history(lm, messages, policy=policy)
    assert [part.tokens for part in read.rounds[0]] and len(read.rounds[0]) == 3
    text = tokenizer.render(messages)
    whole = tokenizer.encode(text[: text.rindex(messages[-1]["content"]) + len(messages[-1]["content"])])
    assert read.seen.item() == len(whole) == read.prefix[0].tokens + sum(part.tokens for part in read.rounds[0])
    cache = kvjax.generate(lm, whole, max_new_tokens=0).cache
    for layer, held in enumerate(cache.layers[BELOW:]):
        k, v = (np.asarray(x)[0] for x in keys_and_values(held))
        for part in read.rounds[0]:
            found = np.asarray(part.upper.kv)[layer, :, :, : part.tokens]
            np.testing.assert_allclose(found[0], k[:, part.start : part.start + part.tokens], atol=1e-5)
            np.testing.assert_allclose(found[1], v[:, part.start : part.start + part.tokens], atol=1e-5)
    question = [{"role": "user", "content": "And?"}]
    wanted = kvjax.generate(lm, question, cache=cache, max_new_tokens=4, logprobs=True).tokens
    every = read.replace(policy=dataclasses.replace(policy, top=1.0))
    assert kvjax.generate(lm, question, cache=every, max_new_tokens=4, logprobs=True).tokens == wanted
    with pytest.raises(kvjax.UsageError, match="in turns"):
        read_history(lm, messages[:-1], policy=policy)
    with pytest.raises(kvjax.UsageError, match="RoundAttention without inner"):
        read_history(lm, messages, policy="full")


def test_no_round_of_a_history_has_been_left_out_yet(lm):
    """Questions that do not select a round are counted from the history's end."""
    from kvjax import read_history

    roles = ("user", "assistant")
    messages = [{"role": role, "content": f"{role} {turn}"} for turn in range(6) for role in roles]
    policy = RoundAttention(watershed=BELOW, drop_after=3)
    before = read_history(lm, messages, policy=policy)
    assert {part.used for part in before.rounds[0]} == set(before.asked) == {6}
    output = kvjax.generate(lm, [{"role": "user", "content": "next"}], cache=before, max_new_tokens=3)
    assert len(output.cache.rounds[0]) == 7, "after one question none has gone"


@pytest.mark.parametrize(
    "messages",
    ["hello", [1, 2], None, [{"role": "user", "content": "x"}, {"role": "assistant"}],
     [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]],
)  # fmt: skip
def test_histories_of_something_else_are_refused(lm, messages):
    from kvjax import read_history

    with pytest.raises(kvjax.UsageError, match=r"Messages are a list|A message needs"):
        read_history(lm, messages, policy=RoundAttention(watershed=BELOW))
    with pytest.raises(kvjax.UsageError, match="The model is a str"):
        read_history("lm", messages, policy=RoundAttention(watershed=BELOW))


@pytest.mark.slow
def test_a_chat_of_rounds(lm):
    system = "Be brief. " * 28  # so long that all turns are in one bucket
    options = {"max_new_tokens": 5, "system": system, "logprobs": True}
    sent, streamed, whole = (
        kvjax.Chat(lm, policy=policy, **options) for policy in ["round:watershed=2"] * 2 + ["round:watershed=2,top=1"]
    )
    plain = kvjax.Chat(lm, **options)
    for text in ("one", "two", "three"):
        output = sent.send(text)
        pieces = list(streamed.stream(text))
        assert pieces[-1].output.tokens == output.tokens
        streamed.park()
        assert whole.send(text).tokens == plain.send(text).tokens
        plain.park()
        plain.park()
    assert output.stats.rounds.rounds == 2 and len(output.stats.rounds.selected) == 1
    prefix = sent.cache.prefix[0].tokens
    assert prefix == len(lm.tokenizer.encode(f"<|start|>system\n{system}<|end|>\n<|start|>user\n"))
    before = sent.cache
    with pytest.raises(kvjax.UsageError):
        sent.send("x" * 2000)
    next(iter(sent.stream("abandoned")))
    assert sent.cache is before
    told = kvjax.Chat(lm, policy="round:watershed=2", context="Facts. " * 3, **options)
    first = told.send("What?")
    assert first.stats.rounds.rounds == 1 and first.stats.rounds.selected == (0,)
