"""SentencePiece vocabularies of GGUF files, id for id; ``scripts/golden_sentencepiece.py`` made the golden values."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import toys
from support import gguf_files

from kvjax.checkpoints.load import load
from kvjax.errors import WeightsError
from kvjax.prompts import tokenize
from kvjax.text.gguf_tokenizer import stop_ids_from_gguf, tokenizer_from_gguf
from kvjax.text.gguf_vocabulary import CONTROL, USER_DEFINED
from kvjax.text.tokenizer import Tokenizer

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "sentencepiece.json").read_text("utf-8"))
ITEMS = [(name, item) for name in GOLDEN for item in GOLDEN[name]["texts"]]


def keys(name: str, **changes) -> dict:
    """Metadata as llama.cpp's converter writes it."""
    found, start = GOLDEN[name], 1 if name == "llama" else 2
    spelled = zip(found["pieces"], found["kinds"], strict=True)
    made = {
        "model": "llama",
        "pre": "default",
        "tokens": [piece.replace("\u2581", " ") if kind == USER_DEFINED else piece for piece, kind in spelled],
        "scores": [
            -1000.0 if kind != 1 else score for score, kind in zip(found["scores"], found["kinds"], strict=True)
        ],
        "token_type": found["kinds"],
        "bos_token_id": start,
        "add_space_prefix": found["add_space_prefix"],
    }
    made |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in made.items() if value is not None}


@pytest.fixture(scope="module", params=GOLDEN)
def built(request) -> tuple[str, Tokenizer]:
    return request.param, tokenizer_from_gguf(keys(request.param), "m.gguf")


def test_ids_and_back(built):
    name, tokenizer = built
    table, prefixed = tokenizer.token_bytes(), name == "llama"
    assert len(GOLDEN[name]["texts"]) > 35
    for item in GOLDEN[name]["texts"]:
        text, ids = item["text"], tokenizer.encode(item["text"])
        assert ids == item["ids"], text
        assert tokenizer.decode(ids) == text
        spelled = f" {text}" if prefixed and text else text
        assert b"".join(table[index] for index in ids) == spelled.encode()


def test_a_text_that_goes_on_after_another_gets_no_space(built):
    _, tokenizer = built
    table, before = tokenizer.token_bytes(), "a line of text\n"
    start = tokenizer.encode(before)
    for item in GOLDEN[built[0]]["texts"]:
        text, ids = item["text"], tokenizer.encode_after(item["text"])
        assert b"".join(table[index] for index in ids) == text.encode()
        whole = tokenizer.encode(before + text)
        if whole[: len(start)] == start:
            assert [*start, *ids] == whole, text


def test_a_question_after_a_context_is_encoded_as_in_one_text():
    """RazorAttention's own model, Baichuan 2, and Llama 2 have such a vocabulary."""
    tokenizer = tokenizer_from_gguf(keys("llama"), "m.gguf")
    lm = dataclasses.replace(toys.tiny_model(), tokenizer=tokenizer)
    whole = (*tokenizer.prefix_ids, *tokenizer.encode("the cat\nWhere is it?"))
    asked = tokenize(lm, "Where is it?", context="the cat\n", chat=False, onto=False)
    assert (*asked.context, *asked.prompts[0]) == whole
    onto = tokenize(lm, "Where is it?", context=None, chat=False, onto=True)
    assert (*tokenizer.prefix_ids, *tokenizer.encode("the cat\n"), *onto.prompts[0]) == whole


def test_pieces_that_spell_spaces_as_older_files_do():
    old = tokenizer_from_gguf(keys("gemma", tokens=GOLDEN["gemma"]["pieces"], scores=GOLDEN["gemma"]["scores"]), "x")
    new = tokenizer_from_gguf(keys("gemma"), "x")
    for item in GOLDEN["gemma"]["texts"]:
        assert old.encode(item["text"]) == item["ids"]
    assert old.token_bytes() == new.token_bytes()


def test_a_text_begins_with_its_token_unless_the_file_says_otherwise():
    assert tokenizer_from_gguf(keys("llama"), "x").prefix_ids == (1,)
    assert tokenizer_from_gguf(keys("gemma"), "x").prefix_ids == (2,)
    assert tokenizer_from_gguf(keys("llama", add_bos_token=False), "x").prefix_ids == ()


def test_control_tokens_are_found_in_the_text_and_a_space_follows_them():
    tokenizer = tokenizer_from_gguf(keys("llama", add_space_prefix=None), "x")
    after = tokenizer.encode("the")
    assert tokenizer.encode("</s>the") == [2, *after] and tokenizer.special_ids == {0, 1, 2}
    turn = GOLDEN["gemma"]["pieces"].index("<start_of_turn>")
    tokenizer = tokenizer_from_gguf(keys("gemma"), "x")
    assert tokenizer.encode("<start_of_turn>the") == [turn, *tokenizer.encode("the")]


def test_spaces_after_phi_3s_control_tokens_do_not_count():
    metadata = keys("llama") | {"general.architecture": "phi3"}
    phi, other = tokenizer_from_gguf(metadata, "x"), tokenizer_from_gguf(keys("llama"), "x")
    assert phi.encode("</s>\n the") == phi.encode("</s>the") != other.encode("</s>\n the")
    assert phi.encode("<s> the") == other.encode("<s> the")


@pytest.mark.parametrize(
    ("tokens", "kinds", "ends"),
    [
        (["<end_of_turn>", "<|end|>", "x"], [CONTROL, CONTROL, 1], (3, 0, 1)),
        (["<|end|>", "<|return|>", "x"], [CONTROL] * 3, (3,)),
        (["<|end|>", "x", "y"], [1] * 3, (3,)),
        # Llama 3.1's, Qwen's and gpt-oss's generation_config.json name these beside the one that a GGUF has.
        (["<|end_of_text|>", "<|eom_id|>", "x"], [CONTROL, CONTROL, 1], (3, 0, 1)),
        (["<|endoftext|>", "<|im_end|>", "x"], [CONTROL, CONTROL, 1], (3, 0, 1)),
        (["<|end|>", "<|return|>", "<|call|>"], [CONTROL] * 3, (3, 2)),
    ],
)
def test_ends_that_are_named_in_the_vocabulary_alone(tokens, kinds, ends):
    made = keys("llama", tokens=[*tokens, "</s>"], token_type=[*kinds, CONTROL], eos_token_id=3)
    assert stop_ids_from_gguf(made) == ends


def test_an_unknown_token_that_is_called_an_end_ends_nothing():
    given = {"tokens": ["<|endoftext|>", "</s>"], "token_type": [CONTROL] * 2, "eos_token_id": 1}
    assert stop_ids_from_gguf(keys("llama", **given)) == (1, 0)
    assert stop_ids_from_gguf(keys("llama", **given, unknown_token_id=0)) == (1,)


@pytest.mark.parametrize("scores", [None, [0.0], [float("nan")] * 600, ["1"] * 600, 5])
def test_scores_that_are_none(scores):
    with pytest.raises(WeightsError, match=r"tokenizer.ggml.scores is not a number for each token"):
        tokenizer_from_gguf(keys("llama", scores=scores), "m.gguf")


def test_a_model_with_such_a_vocabulary(tmp_path):
    case = gguf_files.case("llama_gqa")
    count, tensors = len(GOLDEN["llama"]["pieces"]), gguf_files.gguf_tensors(case)
    rows = np.zeros((count, 32), np.float32)
    tensors |= {"token_embd.weight": rows, "output.weight": rows}
    metadata = {key: value for key, value in gguf_files.metadata(case).items() if not key.startswith("tokenizer.")}
    path = gguf_files.write(tmp_path / "m.gguf", "llama", metadata | keys("llama"), tensors)
    loaded = load(path, progress=False)
    item = GOLDEN["llama"]["texts"][4]
    assert loaded.tokenizer.encode(item["text"]) == item["ids"] and loaded.config.vocab_size == count
