"""Items as token ids: prompts that lose their middle, and questions in a chat template."""

from __future__ import annotations

import dataclasses
import json

import pytest
import tokenizers
import toys
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.errors import UsageError
from kvjax.eval.needle_prompts import template_tokens
from kvjax.eval.suites.data import DataFolder
from kvjax.eval.suites.item import Asked, Item
from kvjax.eval.suites.prompts import cut_middle, prepare, room_of
from kvjax.eval.suites.registry import SUITES
from kvjax.text.gguf_tokenizer import tokenizer_from_gguf
from kvjax.text.tokenizer import Tokenizer


@given(st.text("ab .", max_size=300), st.text("xy?", min_size=1, max_size=60), st.integers(16, 200))
@settings(max_examples=60, deadline=None)
def test_a_prompt_without_its_middle_fits(context, question, room):
    lm = toys.tiny_model()
    first, second = cut_middle(lm, context, question, room)
    count = len(lm.tokenizer.encode(first + second))
    assert count <= room
    if len(context + question) <= room:
        assert (first, second) == (context, question)
    else:
        assert count >= room - 3
        assert (context + question).startswith(first[: room // 2 - 2]) and (first + second).endswith(second)
        if len(question) <= room // 2:
            assert second == question


@given(st.text("aé漢😀", min_size=1, max_size=150), st.integers(16, 100))
@settings(max_examples=60, deadline=None)
def test_halves_that_cut_a_character_fit_too(text, room):
    """Half a character is read back as a longer one."""
    lm = toys.tiny_model()
    first, second = cut_middle(lm, text, "Who?", room)
    assert len(lm.tokenizer.encode(first + second)) <= room and second == "Who?"


def test_questions_are_found_in_the_chat_template():
    lm = toys.tiny_model(max_position=4096)
    item = Item("x", "x", "What is it? It is a stone.\n", "What is it?", ("a",), "F1", 8, answer_prefix=" It is")
    found = prepare(lm, item)
    assert lm.tokenizer.decode(found.question, skip_special_tokens=False).startswith("What is it?<|end|>")
    assert lm.tokenizer.decode(found.question).endswith("It is")
    plain = prepare(lm, dataclasses.replace(item, chat=False))
    assert lm.tokenizer.decode([*plain.context, *plain.question]) == item.context + item.question + " It is"
    with pytest.raises(UsageError, match=r"x takes \d+ tokens and 5000 of answer; the model's context is 4096"):
        prepare(lm, dataclasses.replace(item, max_new_tokens=5000))
    with pytest.raises(UsageError, match="20 tokens are too few for an answer of 30"):
        room_of(lm, 20, 30)


def test_choices_are_encoded_with_what_they_follow():
    """SentencePiece begins each text with a space, which a choice has already."""
    from text.test_gguf_sentencepiece import keys

    tokenizer = tokenizer_from_gguf(keys("llama"), "m.gguf")
    lm = dataclasses.replace(toys.tiny_model(), tokenizer=tokenizer)
    item = Item("x", "x", "a cat\n", "the cat is:", ("0",), "accuracy", 0, chat=False, choices=(" the", " at", "the"))
    found = prepare(lm, item)
    for choice, ids in zip(item.choices, found.choices, strict=True):
        whole = [1, *tokenizer.encode(f"{item.context}{item.question}{choice}")]
        assert [*found.context, *found.question, *ids] == whole
    (ids,) = prepare(toys.tiny_model(), dataclasses.replace(item, choices=(" the",))).choices
    assert ids == toys.byte_tokenizer().encode(" the")


def test_a_prompt_without_a_template_has_the_templates_room():
    """What a template takes is no part of a prompt that is asked without one."""
    lm = toys.tiny_model(max_position=4096)
    template = template_tokens(lm)
    assert template > 0
    assert room_of(lm, 500, 30, chat=False) == room_of(lm, 500, 30) + template == 470 - len(lm.tokenizer.prefix_ids)
    context, question = cut_middle(lm, "a b " * 400, "Who?", room_of(lm, 500, 30, chat=False))
    found = prepare(lm, Item("x", "x", context, question, ("a",), "F1", 30, chat=False))
    assert found.tokens + 30 == 500


def test_a_token_that_the_cut_to_the_question_parts_is_counted(monkeypatch):
    """A context and its question may take more tokens apart than as one text."""
    lm = toys.tiny_model()
    bytes_of, text_of = lm.tokenizer.encode, lm.tokenizer.decode
    # A vocabulary in which a full stop and the line end after it are one token.
    kind = type(lm.tokenizer)
    monkeypatch.setattr(kind, "encode", lambda self, text: bytes_of(text.replace(".\n", "\t")))
    monkeypatch.setattr(kind, "decode", lambda self, ids: text_of(ids).replace("\t", ".\n"))
    encode, context, question = lm.tokenizer.encode, "a" * 100 + ".", "\nWho?"
    whole = len(encode(context + question))
    assert len(encode(context)) + len(encode(question)) == whole + 1
    for room in (whole, 40):
        first, second = cut_middle(lm, context, question, room)
        assert second == question and room - 3 <= len(encode(first)) + len(encode(second)) <= room
    assert cut_middle(lm, context, question, whole + 1) == (context, question)


@pytest.mark.parametrize(("suite", "meets"), [("ruler", "\nW"), ("passkey", " \n")])
def test_a_prompt_that_fills_the_context_fits_when_it_is_read_in_two_parts(suite, meets, tmp_path, monkeypatch):
    """A line end that is one token with the question's first letter is two where the context is read first."""
    (tmp_path / "paulgraham").mkdir()
    (tmp_path / "paulgraham" / "PaulGrahamEssays.json").write_text(json.dumps({"text": "It is so. " * 200}))
    lm = toys.tiny_model()
    plain = Tokenizer(tokenizers.Tokenizer.from_str(lm.tokenizer.to_json()))
    bytes_of = plain.encode
    monkeypatch.setattr(plain, "encode", lambda text: bytes_of(text.replace(meets, "\t")))
    asked = Asked(("niah_single_1",) if suite == "ruler" else ("passkey",), limit=1, seed=0, quick=True)
    spare = set()
    for most in range(1390, 1404):
        config = dataclasses.replace(lm.config, max_position=most)
        model = dataclasses.replace(lm, config=config, tokenizer=plain)
        items = SUITES[suite].items(model, DataFolder(tmp_path), dataclasses.replace(asked, length=most))
        spare.add(most - max(prepare(model, item).tokens + item.max_new_tokens for item in items))
    assert min(spare) < 4
