"""The strategy with which ``generate`` reads prompts under RoundAttention: a turn of every row's conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from kvjax.cache.cache import Cache
from kvjax.cache.host_memory import as_numpy
from kvjax.model.decoder import Decoder
from kvjax.policies.split_cache import SplitCache
from kvjax.rounds.closing import close_round
from kvjax.rounds.conversation import Conversation
from kvjax.rounds.round_programs import RoundPrograms
from kvjax.rounds.stats import RoundStats
from kvjax.rounds.turn import PendingTurn, read_question
from kvjax.runtime.alike_layers import compiles_faster_by_layers
from kvjax.runtime.prefill_batches import Note, spread
from kvjax.runtime.prefill_by_layers import program_names


class RoundStrategy:
    """One turn of every row's conversation: its question is read, and once it was answered its round is closed."""

    prompt_logprobs: list[list[float | None]] | None = None

    def __init__(self) -> None:
        self._params: Any = None
        self._programs: Any = None
        self._asked: PendingTurn | None = None
        self._after: Conversation | None = None
        self._used: list[int] = []

    def programs(self, request: Any, params: Decoder) -> tuple[list[str], list[str]]:
        """Names of the programs that reading and finishing need."""
        fresh = _reading_first(request, params) if request.cache is None else []
        onto = ["lower_onto", "place_round", "upper"] if request.context or not fresh else []
        compress = ["compress"] if request.policy.inner is not None else []
        cut = [] if _programs_of(request).cuts_on_host else ["cut_round"]
        return [*fresh, *onto], [*compress, *cut]

    def read(self, params: Decoder, request: Any, consume: bool, note: Note) -> tuple[Cache, jax.Array]:
        """Read the context as a round of its own, then the questions, then give every sample its row."""
        self._params = params
        self._programs = _programs_of(request)
        kinds: dict[str, Any] = {"policy": request.policy, "dtype": request.dtype, "storage": request.storage}
        kinds |= {"memory_limit": request.memory_limit, "programs": self._programs, "note": note}
        kinds |= {"reserve": request.options.reserve_tokens}
        before, prefix = request.cache, request.prefix
        if request.context:
            ids = [request.context]
            cache, _, asked = read_question(params, ids, before=None, prefix=prefix[:1], consume=False, **kinds)
            before = close_round(params, asked, cache, ids, programs=self._programs, note=note)
            before, consume = before.take([0] * len(request.prompts)), True
        found = read_question(params, request.prompts, before=before, prefix=prefix, consume=consume, **kinds)
        cache, logits, asked = found
        self._asked = asked.take(request.copies)
        return spread(cache, logits, request.copies)

    def finish(self, cache: Cache, fed: Sequence[Sequence[int]], note: Note) -> Conversation:
        """Close every row's round."""
        assert self._asked is not None, "a question is read first"
        self._used = as_numpy(cache.layers[-1].length).max(axis=1).tolist()
        self._after = close_round(self._params, self._asked, cache, fed, programs=self._programs, note=note)
        return self._after

    def stats(self, row: int) -> RoundStats:
        """The rounds that the row's question selected and moved, once it is finished."""
        asked, after = self._asked, self._after
        assert asked is not None and after is not None, "the round is closed first"
        choice = asked.choices[row] if asked.choices else None
        return RoundStats(
            rounds=0 if choice is None else len(choice.attention),
            selected=() if choice is None else choice.selected,
            attention=() if choice is None else tuple(float(x) for x in choice.attention),
            tokens_used=self._used[row],
            moved_bytes=0 if choice is None else sum(upper.nbytes for upper, _ in choice.parts),
            host_bytes=sum(part.upper.nbytes for part in after.rounds[row]),
        )


def _programs_of(request: Any) -> RoundPrograms:
    return RoundPrograms(request.lm.mesh, request.lm.config, request.programs.exact)


def _reading_first(request: Any, params: Decoder) -> list[str]:
    """Names of the programs that read a first question."""
    split = SplitCache(request.policy.layers_below(params.config))
    if not compiles_faster_by_layers(split, params.config, request.lm.mesh):
        return ["prefill_fresh"]
    # In a conversation that goes on, layers above the watershed have another size than those below it.
    kinds = 2 if request.options.reserve_tokens else 1
    return program_names(split, params, fresh=True, onto=False) + ["prefill_layer_fresh"] * (kinds - 1)
