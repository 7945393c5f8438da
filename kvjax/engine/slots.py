"""The engine's batch on the device: prompts are read beside it, rows inserted in place, tokens generated for all."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache.cache import Cache, copied, take
from kvjax.cache.continuation import Continuation, delete
from kvjax.cache.host_memory import as_numpy, device_bytes, live_device_bytes
from kvjax.cache.pool import layout_for
from kvjax.cache.quantisation import Storage
from kvjax.checkpoints.load import LanguageModel
from kvjax.engine.common_context import CommonContext, sharing
from kvjax.engine.controls import RowControls
from kvjax.engine.engine_sizes import EngineSizes, held_after, new_tokens_left
from kvjax.engine.levels import free_after, has_levels, levels_of, resized
from kvjax.engine.row import Row, present
from kvjax.engine.schedule import Group
from kvjax.engine.stepwise_prefill import Prefill
from kvjax.engine.stops import SharedStopTable
from kvjax.errors import KvjaxError, UsageError
from kvjax.memory_needs import full_cache_bytes
from kvjax.policies import Policy
from kvjax.policies.composition import has_own, retained_on_host
from kvjax.policies.guard import check_kept, layers_of
from kvjax.request import Request
from kvjax.runtime.compilation import CompileClock
from kvjax.runtime.decode import REASONS
from kvjax.runtime.insert import Admitted
from kvjax.runtime.programs import Programs
from kvjax.runtime.stopping import check_stop_strings
from kvjax.waiting import ready

#: Steps for which smaller slots must suffice before rows are moved to them.
_STAYS = 64
#: Lengths of prompts are rounded up to multiples of this many tokens where it is asked which slots suffice.
_STEP = 32


class Slots:
    """The state of all slots, and the programs that change it: the :class:`kvjax.engine.loop.Worker` of an engine.

    Attributes:
      rows: of each slot, the request that runs there.
      levels: the sizes that all slots may have; least_level: the smallest of them to be used.
      peak_bytes: the most that arrays held on each device between two programs.
    """

    def __init__(
        self,
        lm: LanguageModel,
        policy: Policy,
        storage: Storage,
        sizes: EngineSizes,
        clock: CompileClock,
        choice: str | None = None,
        common: CommonContext | None = None,
    ):
        self.lm, self.policy, self.storage, self.sizes, self._clock = lm, policy, storage, sizes, clock
        self._choice = choice
        self.programs = Programs(lm.mesh, lm.config, exact=True)
        self.rows: list[Row | None] = [None] * sizes.slots
        self.peak_bytes = 0
        self._kinds: dict[str, Any] = {"policy": policy, "dtype": lm.params.dtype, "storage": storage}
        page_size = layout_for(storage, lm.config.head_dim).page_size
        smaller = common is None and has_levels(
            lm.config, policy, lm.params.dtype, storage, on_mesh=lm.mesh is not None
        )
        own = sizes.own_capacity
        self.levels = levels_of(lm.config, policy, sizes.allocation, page_size, smaller=smaller)
        self._level, self.least_level, size = 0, 0, self.levels[0].allocation
        held: dict[str, Any] = {"prompt_capacity": size.prompt_capacity, "new_capacity": size.new_capacity}
        self._state = self.programs.empty(lm.params, sizes.slots, **self._kinds, **held, own_capacity=own)
        #: The row that every request begins as, where they share a context.
        self.common = None if common is None else common.with_capacity(sizes.allocation)
        if self.common is not None:
            begun = sharing(self._state.cache, self.common, lm.config)
            self._state = dataclasses.replace(self._state, cache=begun)
        self._stops = SharedStopTable(lm.tokenizer, lm.config.vocab_size)
        self._controls = RowControls(lm, self._stops)
        self._ended: list[int] = []
        self._prefill = Prefill(lm, policy, sizes, self.programs, self._kinds, self.common)

    @property
    def shards(self) -> int:
        """Devices of the data axis."""
        return 1 if self.lm.mesh is None else self.lm.mesh.data

    def row_of(self, request: Request, **more: Any) -> Row:
        """A request as the engine keeps it.

        Raises:
          UsageError: it is not of this engine's policy or storage, or its prompt is longer than a slot.
        """
        if self.common is None and request.policy.chosen_once:
            raise UsageError(
                "A context that was read with once=True is shared by an engine's slots, and this engine's share none; "
                "make one with context=, or give all questions to kvjax.generate."
            )
        if request.policy != self.policy or request.storage != self.storage:
            raise UsageError(
                f"This engine's slots hold {self.policy.named} as {self.storage.kind}; a cache of another policy or "
                "storage needs an engine of its own."
            )
        check_stop_strings(request.options.stop_strings)
        seen = 0 if request.cache is None or self.common is not None else int(as_numpy(request.cache.seen)[0])
        total = seen + len(request.context) + len(request.prompts[0])
        if total > self.sizes.prompt_capacity:
            raise UsageError(
                f"The prompt has {total} tokens with what comes before it, and this engine's slots are made for "
                f"{self.sizes.prompt_capacity}; make one with prompt_tokens={total}."
            )
        kind, together = self._prefill.kind_of(request, self.shards)
        return Row(request, kind, together, **more)

    # --- the worker of a loop -----------------------------------------------------------------------------------

    def read(self, group: Group[Row]) -> Iterator[None]:
        """Read a group into its slots; a sentence of what is wrong with them is its requests' own error."""
        now = time.perf_counter()
        for row in group.requests:
            row.times.started = now
        try:
            steps = self._prefill.reading(group)
            while True:
                try:
                    # Devices take programs before they run them: without this wait, running rows would stand behind
                    # all that was begun, however short the pause.
                    ready(next(steps))
                except StopIteration as end:
                    cache, logits = ready(end.value)
                    break
                yield
            self._insert(group, cache, logits)
        except KvjaxError as error:
            for place in group.places:
                if place is not None and not place[0].ended:
                    self._leave(place[1], place[0])
                    place[0].fail(type(error)(str(error)))

    def decode(self, steps: int, least_running: int) -> int:
        """Generate tokens for every slot that runs."""
        self._fit_slots(steps)
        controls = self._controls.of_slots(self.rows, least_running)
        state, made = self.programs.chunk(self.lm.params, self._state, controls, steps)
        self._state = state
        tokens, reasons, logprobs = (as_numpy(x) for x in (state.tokens, state.reason, state.logprobs))
        count = int(made)
        ended: list[tuple[int, Row, str]] = []
        for slot, row in enumerate(self.rows):
            if row is None:
                continue
            new = tokens[slot, :count]
            there = new >= 0
            row.add(new[there].tolist(), logprobs[slot, :count][there].tolist() if row.request.options.logprobs else [])
            reason = REASONS.get(int(reasons[slot]))
            if reason is not None:
                ended.append((slot, row, reason))
            elif there.any():
                row.on_change(row)
        self._finish(ended)
        return count

    def take_ended(self) -> list[int]:
        """The slots that are free again."""
        found, self._ended = self._ended, []
        return found

    def cancel(self, row: Row) -> None:
        """End a row where it is; its slot is free."""
        assert row.slot is not None, "the row waits"
        self._finish([(row.slot, row, "cancelled")])

    def free(self) -> None:
        """Give the memory of all slots back; nothing runs here any more."""
        delete(self._state.cache)
        self._prefill.forget()

    def _insert(self, group: Group[Row], cache: Cache, logits: jax.Array) -> None:
        cache = self._fitted(cache)
        check = self._guard(cache)
        places: list[Row | None] = [None] * len(group.places)
        slots: Any = np.full((len(places),), -1, np.int32)
        starts: Any = np.zeros((len(places),), np.int32)
        for i, place in enumerate(group.places):
            if place is not None and (start := self._start(*place, cache, i, check)) is not None:
                places[i], starts[i] = place[0], start
                slots[i] = place[1] % (self.sizes.slots // self.shards)
        if not any(places):
            return
        held: Any = present(places, self.lm.config.vocab_size)
        admitted = Admitted(logits, held, slots, starts)
        self._fit_slots(1, [row for row in places if row is not None])
        given = self._state, cache, admitted, self._controls.of(places)
        self.peak_bytes = max(self.peak_bytes, live_device_bytes())
        self._state, *found = self.programs.insert(self.lm.config, *given)
        tokens, logprobs, reasons = (as_numpy(x) for x in found)
        self._controls.rows_changed()
        ended: list[tuple[int, Row, str]] = []
        for i, row in enumerate(places):
            if row is None or row.slot is None:
                continue
            self.rows[row.slot] = row
            row.add([int(tokens[i])], [float(logprobs[i])] if row.request.options.logprobs else [])
            reason = REASONS.get(int(reasons[i]))
            if reason is not None:
                ended.append((row.slot, row, reason))
            else:
                row.on_change(row)
        self._finish(ended)

    def _guard(self, cache: Cache, decoded: bool = False) -> Callable[[int], None]:
        """Refuses (UsageError) what a policy of the user's own has kept of a row, if it cannot be."""
        if not has_own(self.policy.chosen):
            return lambda index: None
        kept, seen = retained_on_host(self.policy, cache.layers), as_numpy(cache.seen)
        layers = layers_of(cache, self.policy, self.lm.mesh is not None)

        def check(index: int) -> None:
            row = slice(index, index + 1)
            check_kept(self.policy, layers, [each[row] for each in kept], seen[row], self.lm.config, decoded)

        return check

    def _start(self, row: Row, slot: int, cache: Cache, index: int, check: Callable[[int], None]) -> int | None:
        """Where a row that was read begins in the stop strings' automaton; None of one that ends here."""
        try:
            check(index)
            if not row.cancelled and row.limit > 0:
                self._measure(row, cache, index)
                start = self._stops.begin(row.request.options.stop_strings)
                row.slot, row.stops = slot, True
                return start
            left = take(cache, [index]) if row.keep_cache else None
            row.finish("cancelled" if row.cancelled else "length", _giving(left), self._numbers(cache)(index))
        except UsageError as error:
            row.fail(error)
        self._ended.append(slot)
        return None

    def _fitted(self, cache: Cache) -> Cache:
        """A cache with the pages of the slots: one that was continued may have fewer."""
        pages, slots = tuple(layer.pages for layer in cache.layers), self.levels[-1].pages
        if self.lm.mesh is not None:
            slots = tuple(layer.pages for layer in self._state.cache.layers)
        if pages != slots:
            if any(a > b for own, slot in zip(pages, slots, strict=True) for a, b in zip(own, slot, strict=True)):
                raise UsageError(
                    "The cache has more capacity than this engine's slots; make the engine with larger prompt_tokens."
                )
            if self.lm.mesh is not None:
                raise UsageError("The cache has other sizes than this engine's slots, and a mesh cannot change them.")
            cache = resized(cache, self.levels[-1])
        return cache

    def _measure(self, row: Row, cache: Cache, index: int) -> None:
        """The most tokens a row may generate, for slots of each size."""
        given = self.lm.config, self.policy
        if row.fresh:
            held = held_after(*given, len(row.prompt))
            rounded = -(-len(row.prompt) // _STEP) * _STEP
            row.free = tuple(free_after(*given, level, rounded) for level in self.levels)
        else:
            pools = [as_numpy(layer.length)[index] for layer in cache.layers]
            row.free = tuple(level.free(pools) for level in self.levels)
            held = [length[index] for length in cache.lengths]
        row.capacity = new_tokens_left(*given, self.sizes, held)

    # --- the size of the slots -------------------------------------------------------------------------------------

    def _fit_slots(self, steps: int, admitted: Sequence[Row] = ()) -> None:
        """Move the rows to slots in which all have room for so many steps, if they have not; to smaller ones where
        those will do for longer."""
        rows = [*admitted, *(row for row in self.rows if row is not None)]
        least = max((self._level_for(row, steps) for row in rows), default=self._level)
        later = max((self._level_for(row, steps + _STAYS) for row in rows), default=self._level)
        if least > self._level or (later < self._level and not admitted):
            self.move(max(least, min(later, self._level)))

    def _level_for(self, row: Row, steps: int) -> int:
        """The smallest size in which a row has room for so many steps."""
        fed = min(len(row.tokens) + steps, row.most) - 1
        fits = (i for i, free in enumerate(row.free) if fed <= free and i >= self.least_level)
        return next(fits, len(self.levels) - 1)

    def move(self, level: int) -> None:
        """Move all rows to slots of another size."""
        if level != self._level:
            self._state = dataclasses.replace(self._state, cache=resized(self._state.cache, self.levels[level]))
            self._level = level

    # --- the end of rows ---------------------------------------------------------------------------------------------

    def _finish(self, ended: Sequence[tuple[int, Row, str]]) -> None:
        """Give rows that have ended their outputs, and their slots back."""
        if not ended:
            return
        cache = self._state.cache
        numbers, check = self._numbers(cache), self._guard(cache, decoded=True)
        for slot, row, reason in ended:
            try:
                check(slot)
            except UsageError as error:
                self._leave(slot, row)
                row.fail(error)
                continue
            if reason == "length" and len(row.tokens) < row.limit:
                reason = "memory"  # its slot is full
            # A copy also where there is one slot: the next program consumes it.
            left = copied(cache, [slot]) if row.keep_cache else None
            self._leave(slot, row)
            row.finish(reason, _giving(left), numbers(slot))

    def _numbers(self, cache: Cache) -> Callable[[int], dict[str, Any]]:
        """Gives of each row of a cache what :class:`kvjax.Stats` says of its bytes and slots."""
        own = [as_numpy(kept) for kept in _retained(self.policy, cache.layers)]
        context, shared = cache.context, cache.shared_lengths
        context_bytes = 0 if context is None else device_bytes(jax.tree.leaves(context))
        live = 0 if context is None else context.live_nbytes // cache.batch
        seen, clipped = as_numpy(cache.seen), cache.clipped
        sizes = cache.slot_bytes

        def numbers(index: int) -> dict[str, Any]:
            kept = [layer[index] for layer in own]
            retained = tuple(tuple(map(int, there + held)) for there, held in zip(kept, shared, strict=True))
            return {
                "compile_seconds": self._clock.seconds,
                "cache_bytes": cache.nbytes // cache.batch,
                "device_cache_bytes": cache.device_nbytes,
                "device_peak_bytes": self.peak_bytes,
                "live_cache_bytes": live + sum(int(np.dot(size, own)) for size, own in zip(sizes, kept, strict=True)),
                "shared_cache_bytes": context_bytes,
                "full_cache_bytes": full_cache_bytes(self.lm.config, int(seen[index]), self.lm.params.dtype),
                "clipped": int(clipped[index]),
                "retained": retained,
                "seen": int(seen[index]),
                "windows": self.lm.config.windows_by_layer,
                "choice": self._choice,
            }

        return numbers

    def _leave(self, slot: int, row: Row) -> None:
        """Free a row's slot, and what it has of the stop table."""
        if row.stops:
            self._stops.end(row.request.options.stop_strings)
            row.stops = False
        self.rows[slot] = None
        self._controls.rows_changed()
        self._ended.append(slot)


@functools.partial(jax.jit, static_argnums=0)
def _retained(policy: Policy, layers: Any) -> list[Any]:
    return policy.retained_by_layer(layers)


def _giving(cache: Cache | None) -> Callable[[], Continuation]:
    """Gives a request's cache, or says why there is none."""

    def kept() -> Continuation:
        if cache is None:
            raise UsageError(
                "This prompt's slot was given to another, so it left no cache; ask for it with keep_cache=True of "
                "kvjax.Engine, or generate fewer prompts at a time."
            )
        return cache

    return kept
