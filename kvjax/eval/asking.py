"""Asking questions of compressed caches, a batch of rows at a time, with the runtime's own programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.cache.cache import Cache
from kvjax.cache.quantisation import Storage
from kvjax.checkpoints.load import LanguageModel
from kvjax.eval.recorded import RecordedDecoder
from kvjax.interrupt import Interrupt
from kvjax.memory_needs import full_cache_bytes
from kvjax.options import GenerationOptions
from kvjax.policies.base import Policy
from kvjax.prompts import Prompt
from kvjax.request import Request
from kvjax.runtime.compilation import CompileClock
from kvjax.runtime.decode import CHUNK
from kvjax.session import Session
from kvjax.text.detokenizer import text_of


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a batch of answers, all rows together.

    Attributes:
      live_bytes, allocated_bytes: of the cache when the answers begin.
      full_bytes: what every token seen by then would take.
      steps, seconds: decode steps after the first token, and what they took, compilation apart. A step reads and
        writes for every row, whether the row has ended or not.
    """

    live_bytes: int
    allocated_bytes: int
    full_bytes: int
    steps: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Answers:
    """The answers of a batch: text and tokens of each row, the cache that the next question continues, and the cost."""

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    cache: Cache
    cost: Cost


class Asker:
    """Asks a model; Ctrl-C (``interrupt``) ends the batch that runs and raises KeyboardInterrupt."""

    def __init__(self, lm: LanguageModel, storage: Storage, clock: CompileClock, interrupt: Interrupt):
        self.lm, self._storage, self._clock, self._interrupt = lm, storage, clock, interrupt

    def compress(self, made: RecordedDecoder | None, prompts: Sequence[Sequence[int]], policy: Policy) -> Cache:
        """The cache the policy makes of prompts, from their record or, without one, by reading them."""
        return self._read(self._request(prompts, policy, None, 0), made).cache

    def ask_fresh(
        self, made: RecordedDecoder | None, prompts: Sequence[Sequence[int]], policy: Policy, max_new_tokens: int
    ) -> Answers:
        """Answer whole prompts: what is asked is in view of the compression."""
        return self._answer(self._read(self._request(prompts, policy, None, max_new_tokens), made))

    def ask_onto(self, cache: Cache, prompts: Sequence[Prompt], max_new_tokens: int) -> Answers:
        """Answer what is asked after the cache was compressed; the cache is consumed."""
        return self._answer(self._read(self._request(prompts, None, cache, max_new_tokens), None))

    def _request(self, prompts: Any, policy: Policy | None, cache: Cache | None, max_new_tokens: int) -> Request:
        chat = self.lm.tokenizer.has_chat_template
        options = GenerationOptions(policy=policy, storage=self._storage, chat=chat, max_new_tokens=max_new_tokens)
        return Request(self.lm, list(prompts), options, cache=cache, exact=True)  # bytes of what is needed alone

    def _read(self, request: Request, made: RecordedDecoder | None) -> Session:
        session = Session(request, self._clock, self._interrupt)
        session.prefill(consume=True, params=made)
        self.check()
        return session

    def _answer(self, session: Session) -> Answers:
        request, cache = session.request, session.cache
        full = sum(full_cache_bytes(self.lm.config, int(tokens), request.dtype) for tokens in np.asarray(cache.seen))
        before = dict(live_bytes=cache.live_nbytes, allocated_bytes=cache.nbytes, full_bytes=full)
        del cache
        for _ in session.chunks(CHUNK):
            continue
        self.check()
        return Answers(
            texts=tuple(text_of(self.lm.tokenizer, tokens) for tokens in session.tokens),
            tokens=tuple(map(tuple, session.tokens)),
            cache=session.cache,
            cost=Cost(**before, steps=max(map(len, session.tokens)) - 1, seconds=session.times.decode),
        )

    def check(self) -> None:
        """Raise KeyboardInterrupt when Ctrl-C was pressed."""
        if self._interrupt.requested:
            raise KeyboardInterrupt
