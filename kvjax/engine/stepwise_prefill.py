"""Reads the prompts of an engine's requests beside the batch, in steps between which rows may decode."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

from kvjax.cache.buckets import SHORT
from kvjax.cache.cache import Cache, materialised, take
from kvjax.cache.continuation import check_continuable
from kvjax.checkpoints.load import LanguageModel
from kvjax.engine.engine_sizes import EngineSizes, bucket_for, read_together
from kvjax.engine.row import Row
from kvjax.engine.schedule import Group
from kvjax.policies import Policy
from kvjax.request import Request
from kvjax.runtime.alike_layers import can_stop_between_layers
from kvjax.runtime.prefill_batches import PADDING_PROMPT, Reading, reading
from kvjax.runtime.programs import Programs
from kvjax.runtime.token_logprobs import next_logprobs

#: Contexts whose caches are kept for the next request with the same: those that are planned for.
_CONTEXTS = 1


class Prefill:
    """Reads groups of requests into caches of their own, which have the slots' sizes.

    Args:
      kinds: policy, dtype and storage, as every program takes them.
      common: a row that all requests begin as, if they do.
    """

    def __init__(
        self,
        lm: LanguageModel,
        policy: Policy,
        sizes: EngineSizes,
        programs: Programs,
        kinds: dict[str, Any],
        common: Cache | None = None,
    ):
        self._params, self._sizes, self._programs, self._kinds = lm.params, sizes, programs, kinds
        self._common = common
        self._by_layers = can_stop_between_layers(policy, lm.config, lm.mesh)
        self._contexts: OrderedDict[Any, Cache] = OrderedDict()

    def forget(self) -> None:
        """Let the contexts' caches go."""
        self._contexts.clear()

    def kind_of(self, request: Request, shards: int) -> tuple[Hashable, int]:
        """A key shared by requests that one program can prefill together, and how many of them per data shard."""
        if self._common is None and (request.cache is not None or request.context):
            return ("onto", id(request)), 1
        bucket = bucket_for(len(request.prompts[0]), self._sizes.prompt_capacity)
        return ("bucket", bucket, request.prompt_logprobs), read_together(bucket, self._sizes.slots // shards)

    def reading(self, group: Group[Row]) -> Reading:
        """The steps of reading a group; the last one returns its cache and logits."""
        alike = self._common is not None or group.requests[0].fresh
        return self._alike(group) if alike else self._onto(group)

    def _alike(self, group: Group[Row]) -> Reading:
        """Prompts of one bucket that begin anew, or as the row that all begin as."""
        common = self._common
        padding = PADDING_PROMPT if common is None else ()
        prompts = [padding if place is None else place[0].prompt for place in group.places]
        held = None if common is None else take(common, [0] * len(prompts))
        return self._scored(group, prompts, held, group.requests[0].request.prompt_logprobs)

    def _onto(self, group: Group[Row]) -> Reading:
        """A prompt that goes on with a cache, or with its context."""
        (row,) = group.requests
        held, scored = row.request.cache, row.request.prompt_logprobs
        if held is not None:
            check_continuable("cache=", [held])  # it may have been consumed while the request waited
        before: list[float] = []
        if held is None and scored:
            held, before = yield from self._scored_context(row)
        elif held is None:
            held = yield from self._context(row)
        prompts = [() if place is None else row.prompt for place in group.places]
        held = take(materialised(held), [0] * len(prompts))
        return (yield from self._scored(group, prompts, held, scored, before))

    def _scored_context(self, row: Row) -> Any:
        """A request's context, read for it alone: its cache, and log-probabilities up to the prompt's first token."""
        prompts = [row.request.context, *[PADDING_PROMPT] * (self._programs.rows(1) - 1)]
        found: list[list[float]] = [[] for _ in prompts]
        cache, logits = yield from self._reading(prompts, None, found)
        return take(cache, [0]), [*found[0], *next_logprobs(logits, [0], [row.prompt[0]])]

    def _context(self, row: Row) -> Any:
        """The cache of a request's context: read once for those that come one after another."""
        ids = row.request.context
        if ids not in self._contexts:
            rows = self._programs.rows(1)
            prompts = [ids, *[PADDING_PROMPT] * (rows - 1)]
            cache, _ = yield from self._reading(prompts, None)
            self._contexts[ids] = cache
            while len(self._contexts) > _CONTEXTS:
                self._contexts.popitem(last=False)
        self._contexts.move_to_end(ids)
        return take(self._contexts[ids], [0])

    def _scored(
        self,
        group: Group[Row],
        prompts: Sequence[Any],
        cache: Cache | None,
        scored: bool,
        before: Sequence[float] = (),
    ) -> Reading:
        found: list[list[float]] | None = [[] for _ in prompts] if scored else None
        result = yield from self._reading(prompts, cache, found)
        for place, own in zip(group.places, found or [], strict=False):
            if place is not None:
                place[0].prompt_logprobs = [None, *before, *own]
        return result

    def _reading(self, prompts: Sequence[Any], cache: Cache | None, logprobs: Any = None) -> Reading:
        capacity = self._sizes.prompt_capacity
        more = {"consume": False, "programs": self._programs, "size": self._sizes.allocation, "logprobs": logprobs}
        more |= {"bucket_of": lambda tokens: bucket_for(tokens, capacity)}
        more |= {"by_layers": lambda tokens: self._by_layers and tokens > SHORT}
        return reading(self._params, prompts, cache=cache, **self._kinds, **more)
