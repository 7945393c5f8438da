"""Tokenizers from GGUF and from folders: ids, bytes, templates, ends of text, and what is refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support import gguf_files

import kvjax
from kvjax.checkpoints.load import load
from kvjax.errors import UsageError, WeightsError
from kvjax.text.gguf_bytes import SPLITTINGS
from kvjax.text.gguf_tokenizer import stop_ids_from_gguf, tokenizer_from_gguf
from kvjax.text.tokenizer import Tokenizer, byte_level_alphabet, tokenizer_from_folder

KEYS = gguf_files.metadata(gguf_files.case("llama_gqa"))


def build(pre: str = "gpt-2", **changes) -> Tokenizer:
    return tokenizer_from_gguf(KEYS | {"tokenizer.ggml.pre": pre} | changes, "m.gguf")


@pytest.mark.parametrize("pre", {splitting: name for name, splitting in SPLITTINGS.items()}.values())
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=60, deadline=None)
def test_text_comes_back(pre, text):
    tokenizer = build(pre)
    ids = tokenizer.encode(text)
    if not SPLITTINGS[pre].nfc:  # which composes characters first
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        table = tokenizer.token_bytes()
        assert b"".join(b"<|im_end|>" if i == gguf_files.END else table[i] for i in ids) == text.encode()


def words(pre: str, text: str) -> list[str]:
    pieces = build(pre)._backend.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:stop] for _, (start, stop) in pieces]


@pytest.mark.parametrize(
    ("pre", "want"),
    [
        ("gpt-2", ["It", "'s", " 12345", " o", "'", "clock", "!!", "\n\n ", " x"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " o", "'", "clock", "!!", "\n\n ", " x"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " o", "'clock", "!!\n\n", " ", " x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " o", "'clock", "!!\n\n", " ", " x"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", " o", "'clock", "!!\n\n", " ", " x"]),
        ("gpt-4o", ["It's", " ", "123", "45", " o", "'clock", "!!\n\n", " ", " x"]),
        ("command-r", ["It", "'s", " ", "1", "2", "3", "4", "5", " o", "'", "clock", "!!", "\n\n ", " x"]),
        (
            "deepseek-coder",
            ["It", "'", "s", " ", "1", "2", "3", "4", "5", " o", "'", "clock", "!!", "\n", "\n", " ", " x"],
        ),
        ("falcon", ["It", "'", "s", " ", "123", "45", " o", "'", "clock", "!!", "\n\n ", " x"]),
        ("bloom", ["It's", " 12345", " o'clock", "!!\n\n ", " x"]),
    ],
)
def test_words_before_merging(pre, want):
    # By hand, from the regular expressions in the models' own tokenizer.json.
    assert words(pre, "It's 12345 o'clock!!\n\n  x") == want


@pytest.mark.parametrize(
    ("pre", "want"),
    [
        ("tekken", ["Camel", "Case", "HTTPServer", "'s", " ÉCOLE", "//\n"]),
        ("gpt-4o", ["Camel", "Case", "HTTPServer's", " ÉCOLE", "//\n"]),
        ("dbrx", ["CamelCaseHTTPServer", "'s", " ÉCOLE", "//\n"]),
    ],
)
def test_capitals_begin_words_in_some(pre, want):
    assert words(pre, "CamelCaseHTTPServer's ÉCOLE//\n") == want


def test_names_of_one_splitting_mean_the_same():
    for one, other in [("gpt-2", "phi-2"), ("llama-bpe", "pixtral"), ("qwen2", "stablelm2"), ("smaug-bpe", "glm4")]:
        assert SPLITTINGS[one] == SPLITTINGS[other]
    assert SPLITTINGS["llama-bpe"].whole_words and not SPLITTINGS["smaug-bpe"].whole_words


@pytest.mark.parametrize(("pre", "prefix"), [("llama-bpe", (0,)), ("tekken", (0,)), ("qwen2", ()), ("gpt-4o", ())])
def test_where_the_file_does_not_say_how_text_begins_its_splitting_does(pre, prefix):
    assert build(pre, **{"tokenizer.ggml.bos_token_id": 0}).prefix_ids == prefix


def test_merges_and_added_tokens():
    tokenizer, table = build(), {token: index for index, token in enumerate(gguf_files.TOKENS)}
    assert tokenizer.encode("hello") == [table["hell"], table["o"]]
    assert tokenizer.encode("a<|im_end|><tool>") == [table["a"], gguf_files.END, gguf_files.TOOL]
    assert tokenizer.decode([table["a"], gguf_files.END, gguf_files.TOOL]) == "a<tool>"
    assert tokenizer.special_ids == {gguf_files.END}
    assert tokenizer.vocab_size == gguf_files.VOCAB
    assert tokenizer.token_bytes()[gguf_files.END] == b""
    assert tokenizer.token_bytes()[gguf_files.TOOL] == b"<tool>"
    assert tokenizer.token_bytes()[table["Ġ"]] == b" "
    assert tokenizer.token_bytes() is tokenizer.token_bytes()


def test_half_of_a_surrogate_pair_is_refused():
    with pytest.raises(UsageError, match=r"surrogate"):
        build().encode("a\ud800b")


def test_bytes_alphabet_is_the_librarys():
    assert sorted(byte_level_alphabet()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_level_alphabet().values()) == list(range(256))


def test_sentencepiece_bytes():
    vocabulary = {"<unk>": 0, "<0x0A>": 1, "\u2581a": 2, "é": 3}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>"])
    assert Tokenizer(backend).token_bytes() == [b"", b"\n", b" a", "é".encode()]


def test_template():
    tokenizer = build()
    assert tokenizer.has_chat_template
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render(messages) == "user: hi<|im_end|>assistant:"
    assert tokenizer.render(messages, add_generation_prompt=False) == "user: hi<|im_end|>"


def test_no_template_and_a_template_that_refuses():
    with pytest.raises(UsageError, match=r"no chat template"):
        build(**{"tokenizer.chat_template": None}).render([{"role": "user", "content": "hi"}])
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match=r"refuses the messages: roles must alternate"):
        build(**{"tokenizer.chat_template": template}).render([{"role": "user", "content": "hi"}])


def test_a_template_may_fail_in_any_way():
    with pytest.raises(UsageError, match=r"refuses the messages: division by zero"):
        build(**{"tokenizer.chat_template": "{{ 1 / 0 }}"}).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(("add", "prefix"), [(True, (0,)), (False, ()), (None, ())])
def test_plain_text_begins_as_the_file_says(add, prefix):
    more = {"tokenizer.ggml.bos_token_id": 0, **({} if add is None else {"tokenizer.ggml.add_bos_token": add})}
    assert build(**more).prefix_ids == prefix
    assert build(**more).encode("ab") == build().encode("ab")


def test_stop_ids_of_gguf():
    assert stop_ids_from_gguf(KEYS) == (gguf_files.END,)
    assert stop_ids_from_gguf(KEYS | {"tokenizer.ggml.eos_token_id": 7}) == (7, gguf_files.END)
    more = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 10**6}
    assert stop_ids_from_gguf(KEYS | more) == (7, 9, gguf_files.END)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer of kind 't5'"),
        ({"tokenizer.ggml.model": None}, "tokenizer of kind None"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "'deepseek-llm'"),
        ({"tokenizer.ggml.pre": None}, "None"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.merges": [1]}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["zz q"]}, "merges do not fit"),
        ({"tokenizer.ggml.merges": ["h e", "e h"]}, "merges do not fit its vocabulary ('e' with 'h')"),
        ({"tokenizer.ggml.merges": ["he"]}, "merges do not fit"),
        ({"tokenizer.ggml.tokens": [], "tokenizer.ggml.merges": []}, "its vocabulary is empty"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.merges": []}, "lists a token twice"),
    ],
)
def test_tokenizers_that_cannot_be_read(changes, sentence):
    with pytest.raises(WeightsError) as caught:
        tokenizer_from_gguf(KEYS | changes, "m.gguf")
    assert sentence in str(caught.value)


def embedding(tmp_path, rows: int):
    """A model whose embedding has so many rows, for a vocabulary of 261 of which the last two are added tokens."""
    case = gguf_files.case("llama_gqa")
    tensors = gguf_files.gguf_tensors(case)
    for name in ("token_embd.weight", "output.weight"):
        tensors[name] = np.resize(tensors[name], (rows, tensors[name].shape[1]))
    path = gguf_files.write(tmp_path / f"m{rows}.gguf", "llama", gguf_files.metadata(case), tensors)
    return load(path, progress=False)


def test_a_vocabulary_of_another_model(tmp_path):
    with pytest.raises(WeightsError, match=r"has 259 tokens and the model embeds 250: it belongs to another model"):
        embedding(tmp_path, 250)


def test_added_tokens_beyond_the_embedding_are_said_once_and_left_out(tmp_path, capsys):
    for _ in range(2):
        lm = embedding(tmp_path, gguf_files.END)
    said = capsys.readouterr().err
    assert said.count("kvjax: The tokenizer of") == 1 and "'<|im_end|>' and 1 more tokens beyond the 259 ids" in said
    assert lm.tokenizer.vocab_size == len(lm.tokenizer.token_bytes()) == gguf_files.END
    assert lm.stop_token_ids == () and lm.tokenizer.special_ids == set()
    with pytest.raises(UsageError, match=r"holds the token '<tool>' \(id 260\), which this model does not embed"):
        lm.tokenizer.encode("a<tool>")
    with pytest.raises(UsageError, match=r"<\|im_end\|>"):
        kvjax.generate(lm, "hi", max_new_tokens=1)  # its template writes one
    with pytest.raises(UsageError, match=r"holds the token id 260; this model's ids go from 0 to 258"):
        kvjax.generate(lm, [260], max_new_tokens=1)


def test_an_answer_without_its_end_in_the_embedding(tmp_path):
    folder = gguf_files.write_folder(gguf_files.case("llama_gqa", eos_token_id=None), tmp_path / "m")
    for name, rows in (("config.json", gguf_files.END),):
        config = json.loads((folder / name).read_text()) | {"vocab_size": rows}
        (folder / name).write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][: gguf_files.END].copy()
    save_file(tensors, folder / "model.safetensors")
    assert load(folder, progress=False).stop_token_ids == ()


def test_rows_that_pad_the_embedding_are_never_drawn(tmp_path):
    lm = embedding(tmp_path, 2 * gguf_files.VOCAB)
    assert lm.config.vocab_size == 2 * gguf_files.VOCAB and lm.tokenizer.vocab_size == gguf_files.VOCAB
    answers = kvjax.generate(lm, ["hello"] * 2, temperature=50.0, max_new_tokens=200, chat=False)
    drawn = [int(token) for answer in answers for token in answer.tokens]
    assert len(drawn) > 30 and max(drawn) < gguf_files.VOCAB


@pytest.fixture
def folder(tmp_path):
    """A llama with a byte-level tokenizer and a template."""
    return gguf_files.write_folder(gguf_files.case("llama_gqa"), tmp_path / "m", template=True)


def test_folder_and_gguf_agree(folder):
    ours, theirs = tokenizer_from_folder(folder), build()
    for text in ("hello <|im_end|> <tool>12", "naïve\n\n", ""):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.token_bytes() == theirs.token_bytes()
    assert ours.special_ids == theirs.special_ids
    messages = [{"role": "user", "content": "hi"}]
    assert ours.render(messages) == theirs.render(messages)


def test_folder_equals_transformers_own_reading(folder):
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), tokenizer_from_folder(folder)
    for text in ("hello there", "it's 2024\n", " a  b", "<|im_end|>x"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_truncation_and_padding_of_the_file_are_left_out(folder):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    assert len(tokenizer_from_folder(folder).encode("abcdef")) == 6


def test_template_in_its_own_file(folder):
    (folder / "chat_template.jinja").write_text("own {{ messages[0]['content'] }}")
    assert tokenizer_from_folder(folder).render([{"role": "user", "content": "x"}]) == "own x"


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        ({"eos_token_id": 5}, {}, (5,)),
        ({"eos_token_id": [5, 6]}, {}, (5, 6)),
        ({}, {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": [7, 8]}, (7, 8)),
        (None, {"eos_token_id": None}, (gguf_files.END,)),
        # What the model cannot generate ends nothing: -1 for none, an id beyond the vocabulary, true.
        ({"eos_token_id": [-1, 5, 10**6]}, {}, (5,)),
        ({"eos_token_id": -1}, {"eos_token_id": True}, (gguf_files.END,)),
    ],
)
def test_stop_ids_of_a_folder(tmp_path, generation, config, want):
    folder = gguf_files.write_folder(gguf_files.case("llama_gqa", **({"eos_token_id": None} | config)), tmp_path)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load(folder).stop_token_ids == want


def test_a_template_that_is_no_text(folder):
    (folder / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(WeightsError, match=r"has a chat template that is no text"):
        load(folder)


def test_missing_and_broken_tokenizer_files(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(WeightsError, match=r"tokenizer in .* cannot be read") as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(WeightsError, match=r"holds no tokenizer"):
        load(folder)


def test_code_that_a_folder_brings_is_neither_run_nor_asked_about(folder, monkeypatch):
    (folder / "tokenizer.json").unlink()
    ran = folder / "ran"
    (folder / "tokenization_own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    classes = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(classes))
    (folder / "tokenizer.model").write_bytes(b"")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(
        WeightsError, match=r"is Python code, which kvjax does not run; add the tokenizer\.json"
    ) as said:
        load(folder)
    assert "\n" not in str(said.value) and not ran.exists()


_QUIET = """
import logging
from kvjax.text.tokenizer import import_transformers
import_transformers()
logging.getLogger("transformers").warning("a real warning")
"""


def test_the_notice_about_torch_is_silent_and_warnings_are_not():
    ran = subprocess.run([sys.executable, "-c", _QUIET], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout == ""
    assert ran.stderr.strip().endswith("a real warning")
    assert "PyTorch" not in ran.stderr
