"""A conversation on one compressed cache, or of rounds of which each question brings what it needs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any, Self

from kvjax.cache.cache import Cache
from kvjax.cache.continuation import Continuation
from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.generation import generate, stream_generate
from kvjax.output import Output, Piece
from kvjax.ownership import Owned
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
      cache: the conversation so far, None before the first turn (a :class:`kvjax.Conversation` under RoundAttention).
        It is a value: keep it to branch. Where neither it nor the last ``output.cache`` was read, and the policy keeps
        every token, the next turn reuses its memory; a turn that fails or is abandoned puts it back.
      changes: how often the conversation has changed, so that who saves it knows whether to save it again.
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
        self._held: Owned | None = None
        self.changes = 0

    @property
    def cache(self) -> Cache | Conversation | None:
        return None if self._held is None else self._held.share()  # pyright: ignore[reportReturnType]

    @cache.setter
    def cache(self, value: Continuation | None) -> None:
        self._hold(None if value is None else Owned(value, shared=True))

    @property
    def has_begun(self) -> bool:
        """Whether there was a turn."""
        return self._held is not None

    def _hold(self, held: Owned | None) -> None:
        self._held = held
        self.changes += 1

    def _request(self, text: str) -> tuple[list[dict[str, str]], dict[str, Any]]:
        if not isinstance(text, str) or not text:
            raise UsageError("The message is empty or not text; give at least one character.")
        messages = [{"role": "user", "content": text}]
        if self._held is None:
            if self.system is not None:
                messages.insert(0, {"role": "system", "content": self.system})
            return messages, {**self.options, "policy": self.policy}
        options = {name: value for name, value in self.options.items() if name != "context"}
        return messages, {**options, "cache": self._held}

    def send(self, text: str) -> Output:
        """One turn; a turn that is refused leaves the conversation as it was."""
        messages, options = self._request(text)
        return self._move_on(generate(self.lm, messages, **options))

    def _move_on(self, output: Output) -> Output:
        """Continue from an output, whose cache is this conversation's unless somebody reads it."""
        held = Owned(output.cache)
        self._hold(held)
        return dataclasses.replace(output, _cache=held.share)

    def stream(self, text: str) -> Iterator[Piece]:
        """One turn, streamed; the conversation moves on when the last piece has been taken."""
        messages, options = self._request(text)
        return self._follow(stream_generate(self.lm, messages, **options))

    def _follow(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if piece.output is not None:
                piece = dataclasses.replace(piece, output=self._move_on(piece.output))
            yield piece

    def park(self) -> None:
        """Move the conversation to host memory while its user is idle; the next turn brings back what it needs."""
        if self._held is not None:
            self._held.park()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation so far to a folder, whole or not at all; see :func:`kvjax.save_cache`."""
        from kvjax.saving import save_cache

        if self._held is None:
            raise UsageError("There is nothing to save before the first turn; send a message first.")
        save_cache(path, self._held.value, self.lm)

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
        chat._hold(Owned(cache))
        return chat

    def reset(self) -> None:
        """Forget the conversation."""
        self._hold(None)
