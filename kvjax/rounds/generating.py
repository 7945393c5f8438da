"""What a call of ``generate`` does differently under RoundAttention: how it reads, and what it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from kvjax.cache.cache import Cache
from kvjax.cache.host_memory import as_numpy
from kvjax.output import RoundStats
from kvjax.policies.round_attention import RoundAttention
from kvjax.request import Request
from kvjax.rounds.closing import close_round
from kvjax.rounds.conversation import Conversation
from kvjax.rounds.programs import RoundPrograms
from kvjax.rounds.turn import PendingTurn, read_question
from kvjax.runtime.session import Session, spread


class RoundTurn:
    """One turn of every row's conversation: its question is read, and once it was answered its round is closed."""

    def __init__(self, request: Request, session: Session):
        self._request, self._session = request, session
        self._programs = RoundPrograms(request.lm.mesh, request.lm.config)
        self._asked: PendingTurn | None = None
        self._after: Conversation | None = None
        self._used: list[int] = []

    def prefill(self, consume: bool) -> tuple[Cache, jax.Array]:
        """Read the context as a round of its own, then the questions, then give every sample its row."""
        request, before = self._request, self._request.cache
        prompts, context = request.prompts, request.tokens.context
        if context:
            cache, _, asked = self._read([context], None, request.prefix[:1], consume)
            before = close_round(request.lm.params, asked, cache, [context], programs=self._programs)
            before = before.take([0] * len(prompts))
            consume = True
        cache, logits, asked = self._read(prompts, before, request.prefix, consume)
        copies = [i // request.n for i in range(request.rows)]
        copies += [0] * (self._programs.rows(request.rows) - request.rows)
        cache, logits = spread(cache, logits, copies)
        self._asked = asked.take(copies)
        assert logits is not None
        return cache, logits

    def _read(self, prompts: Sequence[Sequence[int]], before: Any, prefix: Sequence[int], consume: bool) -> Any:
        request, policy = self._request, self._request.policy
        assert isinstance(policy, RoundAttention)
        return self._session.prefill(
            prompts,
            read=read_question,
            policy=policy,
            before=before,
            prefix=prefix,
            consume=consume,
            dtype=request.dtype,
            storage=request.storage,
            memory_limit=request.memory_limit,
            programs=self._programs,
        )

    def finish(self, cache: Cache, tokens: Sequence[Sequence[int]]) -> Conversation:
        """Close every row's round; ``tokens`` were generated, the last of them perhaps not yet fed."""
        assert self._asked is not None
        request, samples = self._request, self._request.n
        self._used = as_numpy(cache.layers[-1].length).max(axis=1).tolist()
        fed = [[*request.prompts[row // samples], *made] for row, made in enumerate(tokens)]
        next_token = as_numpy(cache.next_token).tolist()[: len(fed)]
        fed = [ids[:-1] if token >= 0 else ids for ids, token in zip(fed, next_token, strict=True)]
        self._after = close_round(request.lm.params, self._asked, cache, fed, programs=self._programs)
        return self._after

    def stats(self, row: int) -> RoundStats:
        """What the row's turn selected and moved, once it is finished."""
        asked, after = self._asked, self._after
        assert asked is not None and after is not None
        choice = asked.choices[row] if asked.choices else None
        return RoundStats(
            rounds=0 if choice is None else len(choice.attention),
            selected=() if choice is None else choice.selected,
            attention=() if choice is None else tuple(float(x) for x in choice.attention),
            tokens_used=self._used[row],
            moved_bytes=0 if choice is None else sum(upper.nbytes for upper, _ in choice.parts),
            host_bytes=sum(part.upper.nbytes for part in after.rounds[row]),
        )
