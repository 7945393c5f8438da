"""A conversation on one compressed cache, or of rounds of which each question brings what it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Self

from kvjax.cache.cache import Cache
from kvjax.cache.host_memory import to_host
from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.generation import generate, stream_generate
from kvjax.output import Output, Piece
from kvjax.policies import Policy, parse
from kvjax.rounds.conversation import Conversation

#: Keywords of generate that a conversation sets itself, turn by turn.
_TURN = {"policy", "cache", "consume_cache", "chat", "n"}


class Chat:
    """Several turns with one model; the cache carries the conversation, and every turn reads only what is new.

    Args:
      lm: a model with a chat template.
      policy: which tokens the conversation's cache keeps; or :class:`kvjax.RoundAttention`, which keeps the upper
        layers of earlier rounds in host memory and brings those that a question selects.
      system: the system message, or None for the template's own.
      options: keywords of :func:`kvjax.generate` for every turn, such as ``max_new_tokens`` or ``temperature``;
        ``context=`` is read, and compressed, before the first turn.

    Attributes:
      cache: the conversation so far, None before the first turn. It is a value: keep it to branch. (A
        :class:`kvjax.Conversation` under RoundAttention.)
    """

    def __init__(
        self, lm: LanguageModel, *, policy: Policy | str | None = None, system: str | None = None, **options: Any
    ):
        accepted = set(generate.__kwdefaults__ or {}) - _TURN
        unknown = sorted(set(options) - accepted)
        if unknown:
            raise UsageError(f"Chat takes no {unknown[0]!r}; it takes {', '.join(sorted(accepted))}.")
        self.lm, self.system, self.options = lm, system, options
        self.policy = None if policy is None else parse(policy)
        self.cache: Cache | Conversation | None = None

    def _request(self, text: str) -> tuple[list[dict[str, str]], dict[str, Any]]:
        if not isinstance(text, str) or not text:
            raise UsageError("The message is empty or not text; give at least one character.")
        messages = [{"role": "user", "content": text}]
        if self.cache is None:
            if self.system is not None:
                messages.insert(0, {"role": "system", "content": self.system})
            return messages, {**self.options, "policy": self.policy}
        options = {name: value for name, value in self.options.items() if name != "context"}
        return messages, {**options, "cache": self.cache}

    def send(self, text: str) -> Output:
        """One turn; a turn that is refused leaves the conversation as it was."""
        messages, options = self._request(text)
        output = generate(self.lm, messages, **options)
        self.cache = output.cache
        return output

    def stream(self, text: str) -> Iterator[Piece]:
        """One turn, streamed; the conversation moves on when the last piece has been taken."""
        messages, options = self._request(text)
        return self._follow(stream_generate(self.lm, messages, **options))

    def _follow(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if piece.output is not None:
                self.cache = piece.output.cache
            yield piece

    def park(self) -> None:
        """Move the conversation to host memory while its user is idle; the next turn brings back what it needs."""
        if isinstance(self.cache, Cache):
            self.cache = to_host(self.cache)
        elif self.cache is not None:
            self.cache = self.cache.parked()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation so far to a folder, whole or not at all; see :func:`kvjax.save_cache`."""
        from kvjax.saving import save_cache

        if self.cache is None:
            raise UsageError("There is nothing to save before the first turn; send a message first.")
        save_cache(path, self.cache, self.lm)

    @classmethod
    def load(cls, path: str | os.PathLike[str], lm: LanguageModel, **options: Any) -> Self:
        """Continue a conversation that was saved, under the policy it was saved with; see :func:`kvjax.load_cache`.

        ``options`` are those of every turn, as for :class:`Chat`; only the storage is part of what is saved.
        """
        from kvjax.saving import load_cache

        if "policy" in options:
            raise UsageError("A conversation that was saved goes on under its own policy; leave policy= out.")
        cache = load_cache(path, lm, memory_limit=options.get("memory_limit"))
        chat = cls(lm, policy=cache.policy, **options)
        chat.options.setdefault("storage", cache.storage)  # reset() forgets what was said, not how it was kept
        chat.cache = cache
        return chat

    def reset(self) -> None:
        """Forget the conversation."""
        self.cache = None
