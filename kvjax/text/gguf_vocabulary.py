"""The vocabulary in a GGUF's metadata: its tokens with their kinds, and the ids that have a role."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from kvjax.errors import WeightsError

#: Kinds of tokens (``tokenizer.ggml.token_type``), as SentencePiece numbers them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
#: How SentencePiece's pieces spell a space.
SPACE = "\u2581"


class Vocabulary:
    """Tokens by id.

    Attributes:
      metadata: of the file.
      origin: the file, for messages.
      tokens: text of every token.
      kinds: kind of every token; a normal one where the file does not say.
    """

    def __init__(self, metadata: Mapping[str, Any], origin: str):
        """Raises WeightsError when the metadata has no tokens, or one twice."""
        self.metadata, self.origin = metadata, origin
        tokens, given = self.strings("tokens"), metadata.get("tokenizer.ggml.token_type")
        kinds = given[: len(tokens)] if isinstance(given, list) else []
        self.kinds: list[Any] = kinds + [NORMAL] * (len(tokens) - len(kinds))
        # Tokens that are looked for in the text as it is; older files spell their spaces as pieces do.
        spelled = zip(tokens, self.kinds, strict=True)
        self.tokens = [text.replace(SPACE, " ") if kind == USER_DEFINED else text for text, kind in spelled]
        if not tokens or len(set(self.tokens)) != len(tokens):
            said = "lists a token twice" if tokens else "is empty"
            raise WeightsError(f"{origin} is corrupt: its vocabulary {said}.")

    def strings(self, name: str) -> list[str]:
        """A list of texts; WeightsError where it is missing or holds anything else."""
        values = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise WeightsError(f"{self.origin} holds no tokenizer: tokenizer.ggml.{name} is missing.")
        return values

    def of_kind(self, wanted: int) -> list[int]:
        """Ids whose kind is ``wanted``."""
        return [index for index, kind in enumerate(self.kinds) if kind == wanted]

    def role(self, name: str) -> int | None:
        """The id of a role ("bos", "unknown", ...), or None where the file gives none that is in the vocabulary."""
        index = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return index if isinstance(index, int) and 0 <= index < len(self.tokens) else None

    def adds_bos(self, default: bool) -> bool:
        """Whether text begins with the token of beginnings; ``default`` where the file does not say."""
        return bool(self.metadata.get("tokenizer.ggml.add_bos_token", default))

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """Id of every token by its text."""
        return {token: index for index, token in enumerate(self.tokens)}
