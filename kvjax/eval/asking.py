"""Asking questions of compressed caches, a batch of rows at a time, with the runtime's own programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache.cache import Cache
from kvjax.cache.quantisation import Storage
from kvjax.checkpoints.load import LanguageModel
from kvjax.eval.recorded import RecordedDecoder
from kvjax.model.decoder import Decoder
from kvjax.options import GenerationOptions
from kvjax.planning import full_cache_bytes
from kvjax.policies.base import Policy
from kvjax.prompts import Prompt
from kvjax.request import Request
from kvjax.runtime.compilation import CompileClock
from kvjax.runtime.decode import CHUNK
from kvjax.runtime.interrupt import Interrupt
from kvjax.runtime.session import Session, read_prompts
from kvjax.text.detokenizer import text_of


@dataclasses.dataclass(frozen=True)
class Cost:
    """What answers cost, of all rows of a batch together.

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
    """What a batch answered: text and tokens of each row, the cache for the next turn to go onto, and the cost."""

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
        request = self._request(prompts, policy, None, 0)
        params = self.lm.params if made is None else made
        cache, _ = self._read(params, request)
        return cache

    def ask_fresh(
        self, made: RecordedDecoder | None, prompts: Sequence[Sequence[int]], policy: Policy, max_new_tokens: int
    ) -> Answers:
        """Answer whole prompts: what is asked is in view of the compression."""
        request = self._request(prompts, policy, None, max_new_tokens)
        params = self.lm.params if made is None else made
        cache, logits = self._read(params, request)
        return self._answer(request, self._session(request), cache, logits)

    def ask_onto(self, cache: Cache, prompts: Sequence[Prompt], max_new_tokens: int) -> Answers:
        """Answer what is asked after the cache was compressed; the cache is consumed."""
        request = self._request(prompts, None, cache, max_new_tokens)
        session = self._session(request)
        options: dict[str, Any] = dict(policy=request.policy, dtype=request.dtype)
        cache, logits = session.prefill(request.prompts, cache=request.cache, consume=True, **options)
        self.check()
        return self._answer(request, session, cache, logits)

    def _request(self, prompts: Any, policy: Policy | None, cache: Cache | None, max_new_tokens: int) -> Request:
        chat = self.lm.tokenizer.has_chat_template
        options = GenerationOptions(policy=policy, storage=self._storage, chat=chat, max_new_tokens=max_new_tokens)
        return Request(self.lm, list(prompts), options, cache=cache)

    def _read(self, params: Decoder, request: Request) -> tuple[Cache, jax.Array]:
        options: dict[str, Any] = dict(policy=request.policy, dtype=request.dtype, storage=request.storage)
        result = jax.block_until_ready(read_prompts(params, request.prompts, cache=None, consume=False, **options))
        self.check()
        return result

    def _session(self, request: Request) -> Session:
        return Session(self.lm.params, request.controls(), self._clock, self._interrupt)

    def _answer(self, request: Request, session: Session, cache: Cache, logits: jax.Array) -> Answers:
        seen = np.asarray(cache.seen)
        full = sum(full_cache_bytes(self.lm.config, int(tokens), request.dtype) for tokens in seen)
        before = dict(live_bytes=cache.live_nbytes, allocated_bytes=cache.nbytes, full_bytes=full)
        present = np.zeros((request.rows, self.lm.config.vocab_size), bool)
        rows = session.start(cache, logits, present, False).tokens
        for result in session.chunks(CHUNK):
            rows = [old + new for old, new in zip(rows, result.tokens, strict=True)]
        self.check()
        return Answers(
            texts=tuple(text_of(self.lm.tokenizer, tokens) for tokens in rows),
            tokens=tuple(map(tuple, rows)),
            cache=session.cache,
            cost=Cost(**before, steps=max(map(len, rows)) - 1, seconds=session.times.decode),
        )

    def check(self) -> None:
        """Raise KeyboardInterrupt when Ctrl-C was pressed."""
        if self._interrupt.requested:
            raise KeyboardInterrupt
