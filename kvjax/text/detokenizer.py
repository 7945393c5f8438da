"""Turns generated tokens into text: complete characters, nothing that must be taken back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from kvjax.text.tokenizer import Tokenizer


class TextStream:
    """Makes text of tokens that never has to be taken back: complete characters, no half stop strings.

    Stop strings are looked for among bytes, as the compiled loop does; bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self._tokenizer, self._bytes = tokenizer, tokenizer.token_bytes()
        self._stops = [stop.encode() for stop in stops]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""
        self._stopped = False
        self._drop: int | None = None  # characters missing at the beginning, known from the first visible token on

    def add(self, tokens: Sequence[int]) -> str:
        """Text that these tokens make certain."""
        if self._stopped:
            return ""
        for token in tokens:
            new = self._bytes[token] if token < len(self._bytes) else b""
            if new and self._drop is None:
                self._drop = self._missing(token, new)
            self._held += new
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        self._stopped = bool(found)
        certain = min(found) if found else len(self._held) - self._doubtful()
        ready, self._held = self._held[:certain], b"" if found else self._held[certain:]
        return self._decode(ready, final=False)

    def rest(self) -> str:
        """Text that was still withheld, when no more tokens follow."""
        held, self._held = self._held, b""
        return self._decode(held, final=True)

    def _decode(self, ready: bytes, final: bool) -> str:
        text = self._decoder.decode(ready, final)
        if text and self._drop:
            text, self._drop = text[self._drop :], 0
        return text

    def _missing(self, token: int, new: bytes) -> int:
        """Characters the tokenizer leaves out when text begins with this token: sentencepiece's first space."""
        return len(new.decode("utf-8", "replace")) - len(self._tokenizer.decode([token])) if new[:1] == b" " else 0

    def _doubtful(self) -> int:
        """Bytes at the end that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest


def text_of(tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str] = ()) -> str:
    """Text of all the tokens, without the first stop string and what follows it."""
    stream = TextStream(tokenizer, stops)
    return stream.add(tokens) + stream.rest()
