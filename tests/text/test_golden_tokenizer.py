"""The default model's tokenizer and chat template, id for id; ``scripts/golden_logits.py`` made the golden values."""

from __future__ import annotations

import json
import pathlib

import pytest

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "smollm2.json").read_text())


@pytest.mark.parametrize("item", GOLDEN["strings"] + GOLDEN["prompts"])
def test_ids_and_back(item, default_model):
    tokenizer = default_model.tokenizer
    assert tokenizer.encode(item["text"]) == item["ids"]
    assert tokenizer.decode(item["ids"], skip_special_tokens=False) == item["text"]


@pytest.mark.parametrize("item", GOLDEN["conversations"], ids=lambda item: f"{len(item['messages'])} messages")
def test_chat_template(item, default_model):
    tokenizer = default_model.tokenizer
    assert tokenizer.has_chat_template
    assert tokenizer.render(item["messages"]) == item["text"]
    assert tokenizer.render(item["messages"], add_generation_prompt=False) == item["closed"]
    assert tokenizer.encode(item["text"]) == item["ids"]


def test_bytes_of_tokens_spell_the_text(default_model):
    table, special = default_model.tokenizer.token_bytes(), default_model.tokenizer.special_ids
    for item in GOLDEN["strings"]:
        if special.isdisjoint(item["ids"]):
            assert b"".join(table[i] for i in item["ids"]) == item["text"].encode()
