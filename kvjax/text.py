"""From generated tokens to text: whole characters, nothing that must be taken back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from kvjax.model.tokenizer import Tokenizer


def cut(text: str, stops: tuple[str, ...]) -> str:
    """Text up to the first stop string."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else text


class TextStream:
    """Turns tokens into text that never has to be taken back: whole characters, no half stop strings."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]):
        self._bytes = tokenizer.token_bytes()
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._given, self._held = 0, ""
        self._text = ""

    def add(self, tokens: Sequence[int]) -> str:
        """Text that these tokens make certain."""
        new = b"".join(self._bytes[token] for token in tokens if token < len(self._bytes))
        self._text = cut(self._text + self._decoder.decode(new), self._stops)
        certain = len(self._text) - self._doubtful()
        piece = self._text[self._given : certain]
        self._given = max(self._given, certain)
        return piece

    def _doubtful(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def rest(self, text: str) -> str:
        """What the whole text has beyond the pieces given."""
        return text[self._given :]
