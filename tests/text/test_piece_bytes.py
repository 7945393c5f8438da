"""The bytes of a byte-level vocabulary's entries, those in no alphabet among them."""

from __future__ import annotations

import tokenizers

from kvjax.text.tokenizer import Tokenizer, byte_level_alphabet


def test_an_entry_in_no_alphabet_is_its_own_text():
    alphabet = byte_level_alphabet()
    entries = [*alphabet, "\u4e2d", "a\u4e2d", "\u00a0", "\u0120a"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={text: i for i, text in enumerate(entries)}, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    found = Tokenizer(backend).token_bytes()
    assert found[:256] == [bytes([alphabet[text]]) for text in entries[:256]]
    assert found[256:] == ["\u4e2d".encode(), "a\u4e2d".encode(), "\u00a0".encode(), b" a"]
