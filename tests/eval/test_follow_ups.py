"""Conversations: three facts about two keys, asked one after the other."""

from __future__ import annotations

import collections
import re

import pytest
import toys

from kvjax.errors import UsageError
from kvjax.eval import follow_ups, ruler
from kvjax.eval.follow_ups import make_conversations


@pytest.fixture(scope="module")
def tokenizer():
    return toys.needle_model().tokenizer


def test_two_facts_share_a_key_and_the_third_does_not(tokenizer):
    kinds = collections.Counter()
    for talk in make_conversations(tokenizer, length=480, samples=6):
        keys = []
        for turn in range(3):
            kind, key = re.fullmatch(
                r"What is the special magic (\w+) for (.+) mentioned in the provided text\?", talk.questions[turn]
            ).groups()
            kinds[turn, kind] += 1
            keys.append(key)
            assert talk.context.count(f"The special magic {kind} for {key} is: {talk.outputs[turn]}.\n") == 1
            assert talk.prefixes[turn].startswith(f"The special magic {kind} for {key} ")
        assert keys[0] == keys[1] != keys[2]
        assert talk.context.count("The special magic") == 3
    assert len(kinds) == 9 and set(kinds.values()) == {2}, "every kind as often in every turn"


def test_lengths_count_all_turns_and_the_seed_decides(tokenizer):
    talks = make_conversations(tokenizer, length=480, samples=4, seed=1)
    for talk in talks:
        assert 420 < talk.length <= 480
        messages = []
        for turn in range(3):
            messages += talk.prompt(turn, chat=True)
        rendered = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=False))
        assert abs(len(rendered) + 3 * follow_ups.ANSWER_TOKENS - talk.length) < 20
    assert talks == make_conversations(tokenizer, length=480, samples=5, seed=1)[:4]
    assert talks != make_conversations(tokenizer, length=480, samples=4, seed=2)


def test_prompts_with_and_without_a_template(tokenizer):
    (talk,) = make_conversations(tokenizer, length=480, samples=1)
    user, answer = talk.prompt(0, chat=True)
    assert user["content"] == talk.context + talk.questions[0] and answer["content"] == talk.prefixes[0]
    assert talk.prompt(1, chat=True)[0]["content"] == talk.questions[1]
    assert talk.prompt(0, chat=False) == f"{talk.context}{talk.questions[0]} {talk.prefixes[0]}"
    assert talk.prompt(2, chat=False) == f"\n{talk.questions[2]} {talk.prefixes[2]}"


def test_no_answer_hides_in_another_or_in_the_noise():
    words = [*follow_ups._COLORS, *follow_ups._ANIMALS]
    for word in words:
        assert word not in ruler.NOISE.lower()
        assert not any(word in other for other in words if other != word)


def test_bad_requests_are_one_sentence(tokenizer):
    with pytest.raises(UsageError, match="100 tokens are too few"):
        make_conversations(tokenizer, length=100, samples=1)
    with pytest.raises(UsageError, match="samples is 0"):
        make_conversations(tokenizer, length=480, samples=0)
