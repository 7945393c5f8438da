"""A conversation over one compressed cache or, under Round Attention, over rounds in host memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any, Self, Unpack

from kvjax.cache.buckets import RESERVE
from kvjax.cache.cache import Cache
from kvjax.cache.continuation import Continuation, check_continuable
from kvjax.cache.host_memory import as_numpy
from kvjax.checkpoints.load import LanguageModel, check_model
from kvjax.errors import UsageError, quoted
from kvjax.generation import generate, stream_generate
from kvjax.given_caches import how_to_continue
from kvjax.options import ChatKeywords, GenerationOptions, merged, shows_options
from kvjax.output import Output, Piece
from kvjax.ownership import Owned
from kvjax.policies import Policy, parse
from kvjax.rounds.conversation import Conversation


@shows_options(without=("chat",))
class Chat:
    """A conversation with one model: the cache is carried along, and each turn prefills only its new tokens.

    Args:
      lm: a model with a chat template.
      options: how to answer, for all turns. Under :class:`kvjax.RoundAttention` the upper layers of earlier rounds are
        kept in host memory, and those that a question selects are brought back.
      system: the system message, or None for the template's own.
      context: text that is read, and compressed, before the first turn.
      keywords: fields of :class:`kvjax.GenerationOptions`, in place of those of ``options``:

    Attributes:
      cache: the conversation so far, None before the first turn (a :class:`kvjax.Conversation` under RoundAttention).
        It is immutable: keep it to branch. If neither it nor the last ``output.cache`` was read, and the policy keeps
        every token, the next turn reuses its memory; a turn that fails or is abandoned restores it. One that is
        assigned goes on under its own policy and storage; ``system`` and ``context`` are of a first turn alone.
      changes: how often the conversation has changed, for callers that save it.
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
        check_model(lm)
        if system is not None and not isinstance(system, str):
            raise UsageError(f"system is {quoted(system)}; give text.")
        if context is not None and not isinstance(context, str):
            raise UsageError(f"context is {quoted(context)}; give text.")
        self.options = merged("Chat", options, keywords, also=("system", "context"), without=("chat",))
        if not self.options.chat:
            raise UsageError("Chat writes its turns by the chat template; leave chat=False out of its options.")
        if self.options.reserve_tokens is None:  # a conversation will go on: its first turn reserves what later ones do
            self.options = dataclasses.replace(self.options, reserve_tokens=RESERVE)
        self.lm, self.system, self.context = lm, system, context
        self._held: Owned | None = None
        self.changes = 0

    @property
    def cache(self) -> Cache | Conversation | None:
        return None if self._held is None else self._held.share()  # pyright: ignore[reportReturnType]

    @cache.setter
    def cache(self, value: Continuation | None) -> None:
        if value is not None:
            check_continuable("Chat.cache", [value], one=True)
            _check_one_row(value)
            policy, storage = how_to_continue(self.lm, self.options, value)
            self.options = dataclasses.replace(self.options, policy=policy, storage=storage)
        self._hold(None if value is None else Owned(value, shared=True))

    @property
    def has_begun(self) -> bool:
        """Whether there was a turn."""
        return self._held is not None

    @property
    def context_left(self) -> int | None:
        """Tokens that the conversation may still take; None under a policy that goes on beyond the model's context."""
        policy = self.policy
        if policy is not None and policy.beyond_context:
            return None
        seen = 0 if self._held is None else int(as_numpy(self._held.value.seen)[0])
        return max(self.lm.config.max_position - seen, 0)

    def _hold(self, held: Owned | None) -> None:
        self._held = held
        self.changes += 1

    @property
    def policy(self) -> Policy | None:
        """The policy that was asked for, None for all tokens."""
        return None if self.options.policy is None else parse(self.options.policy)

    def _request(self, text: str) -> tuple[list[dict[str, str]], dict[str, Any]]:
        if not isinstance(text, str) or not text:
            raise UsageError("The message is empty or not text; give at least one character.")
        messages = [{"role": "user", "content": text}]
        if self._held is not None:
            return messages, {"options": dataclasses.replace(self.options, policy=None), "cache": self._held}
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return messages, {"options": self.options, "context": self.context}

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
        return self._follow(stream_generate(self.lm, messages, **options), self.changes)

    def _follow(self, pieces: Iterator[Piece], changes: int) -> Iterator[Piece]:
        self._check_unchanged(changes)
        for piece in pieces:
            if piece.output is not None:
                self._check_unchanged(changes)
                piece = dataclasses.replace(piece, output=self._move_on(piece.output))
            yield piece

    def _check_unchanged(self, changes: int) -> None:
        """Refuse (UsageError) a streamed turn when another has changed the conversation since it was asked for."""
        if self.changes != changes:
            raise UsageError(
                "The conversation has gone on from here since the stream was made; take one turn at a time."
            )

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
        cache = load_cache(path, lm, memory_limit=chat.options.memory_limit)
        _check_one_row(cache)
        # reset() forgets what was said, not how it was kept.
        policy, storage = how_to_continue(lm, chat.options, cache)
        chat.options = dataclasses.replace(chat.options, policy=policy, storage=storage)
        chat._hold(Owned(cache))
        return chat

    def reset(self) -> None:
        """Forget the conversation."""
        self._hold(None)


def _check_one_row(value: Continuation) -> None:
    """Refuse (UsageError) several rows: a conversation is one."""
    if value.batch != 1:
        raise UsageError(f"The cache has {value.batch} rows and a conversation is one; give one, such as cache.row(0).")
