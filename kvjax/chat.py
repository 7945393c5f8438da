"""A conversation on one compressed cache, or of rounds of which each question brings what it needs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any, Self, Unpack

from kvjax.cache.cache import Cache
from kvjax.cache.host_memory import to_host
from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.generation import generate, stream_generate
from kvjax.options import ChatKeywords, GenerationOptions, merged, shows_options
from kvjax.output import Output, Piece
from kvjax.policies import Policy, parse
from kvjax.rounds.conversation import Conversation


@shows_options(without=("chat",))
class Chat:
    """Several turns with one model; the cache carries the conversation, and every turn reads only what is new.

    Args:
      lm: a model with a chat template.
      options: how to answer, for all turns. Under :class:`kvjax.RoundAttention` the upper layers of earlier rounds are
        kept in host memory, and those that a question selects are brought back.
      system: the system message, or None for the template's own.
      context: text that is read, and compressed, before the first turn.
      keywords: fields of :class:`kvjax.GenerationOptions`, in place of those of ``options``:

    Attributes:
      cache: the conversation so far, None before the first turn. It is a value: keep it to branch. (A
        :class:`kvjax.Conversation` under RoundAttention.)
    """

    def __init__(
        self,
        lm: LanguageModel,
        options: GenerationOptions | None = None,
        *,
        system: str | None = None,
        context: str | None = None,
        **keywords: Unpack[ChatKeywords],
    ):
        self.options = merged("Chat", options, keywords, also=("system", "context"), without=("chat",))
        if not self.options.chat:
            raise UsageError("Chat writes its turns by the chat template; leave chat=False out of its options.")
        self.lm, self.system, self.context = lm, system, context
        self.cache: Cache | Conversation | None = None

    @property
    def policy(self) -> Policy | None:
        """The policy that was asked for, None for all tokens."""
        return None if self.options.policy is None else parse(self.options.policy)

    def _request(self, text: str) -> tuple[list[dict[str, str]], dict[str, Any]]:
        if not isinstance(text, str) or not text:
            raise UsageError("The message is empty or not text; give at least one character.")
        messages = [{"role": "user", "content": text}]
        if self.cache is not None:
            return messages, {"options": dataclasses.replace(self.options, policy=None), "cache": self.cache}
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return messages, {"options": self.options, "context": self.context}

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
    def load(
        cls,
        path: str | os.PathLike[str],
        lm: LanguageModel,
        options: GenerationOptions | None = None,
        *,
        system: str | None = None,
        context: str | None = None,
        **keywords: Unpack[ChatKeywords],
    ) -> Self:
        """Continue a conversation that was saved, under the policy it was saved with; see :func:`kvjax.load_cache`.

        The other arguments are those of :class:`Chat`; of the options, only policy and storage are saved.
        """
        from kvjax.saving import load_cache

        chat = cls(lm, options, system=system, context=context, **keywords)
        if chat.options.policy is not None:
            raise UsageError("A conversation that was saved goes on under its own policy; leave policy= out.")
        chat.cache = cache = load_cache(path, lm, memory_limit=chat.options.memory_limit)
        # reset() forgets what was said, not how it was kept.
        storage = cache.storage if chat.options.storage is None else chat.options.storage
        chat.options = dataclasses.replace(chat.options, policy=cache.policy, storage=storage)
        return chat

    def reset(self) -> None:
        """Forget the conversation."""
        self.cache = None
