"""The engine that its caller drives: the slots of a batch, the loop that gives them work, and what warms them up."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvjax.cache.cache import Cache
from kvjax.cache.quantisation import Storage, parse_storage
from kvjax.checkpoints.load import LanguageModel, check_model
from kvjax.engine.common_context import common_context
from kvjax.engine.engine_sizes import MOST_SLOTS, EngineSizes, buckets, engine_sizes, read_together
from kvjax.engine.loop import MOST_STEPS, Loop
from kvjax.engine.row import Row
from kvjax.engine.schedule import Scheduler
from kvjax.engine.slots import Slots
from kvjax.errors import UsageError
from kvjax.given_caches import how_to_continue
from kvjax.options import GenerationOptions
from kvjax.policies import Full, Policy, parse
from kvjax.policies.best import resolve
from kvjax.policies.guard import check_value
from kvjax.policies.window_layers import for_model
from kvjax.prompts import as_told
from kvjax.request import Request
from kvjax.runtime.compilation import close_clock, open_clock

#: Steps of one measurement of their time.
_TIMED_STEPS = 16


class EngineCore:
    """An engine that its caller drives, iteration by iteration, in one thread.

    Attributes:
      sizes: what it has allocated. loop, slots: its schedule and its batch. clock: of what it compiles.
    """

    def __init__(
        self,
        lm: LanguageModel,
        policy: Policy | str | None = None,
        storage: Storage | str | None = None,
        *,
        slots: int | None = None,
        most_slots: int = MOST_SLOTS,
        prompt_tokens: int,
        new_tokens: int,
        memory_limit: int | None = None,
        max_pause: float = 0.5,
        context: Cache | None = None,
    ):
        if spans_processes(lm):
            raise UsageError("An engine runs on the devices of one process; start one in each, or use kvjax.batch.run.")
        self.lm = lm
        common = None if context is None else common_context(lm, context)
        if common is None:
            self.policy, self.storage = engine_policy(lm, policy), parse_storage(storage, lm.config.head_dim)
        else:
            self.policy, self.storage = common.row.policy, common.row.storage
            how_to_continue(lm, GenerationOptions(policy=policy, storage=storage), common.row)
        choice = None if policy is None else resolve(parse(policy), lm.config, later=False).line
        kinds = {"dtype": lm.params.dtype, "memory_limit": memory_limit, "mesh": lm.mesh}
        kinds |= {"slots": slots, "most_slots": most_slots, "context": common}
        sizes = engine_sizes(
            lm.config, self.policy, self.storage, prompt_tokens=prompt_tokens, new_tokens=new_tokens, **kinds
        )
        self.sizes: EngineSizes = sizes
        self.clock = open_clock()
        try:
            self.slots = Slots(lm, self.policy, self.storage, sizes, self.clock, choice, common)
        except BaseException:
            close_clock(self.clock)
            raise
        self.loop: Loop[Row] = Loop(
            Scheduler(sizes.slots, self.slots.shards), self.slots, time.perf_counter, max_pause=max_pause
        )

    def add(self, row: Row) -> None:
        """Put a request at the end of the queue."""
        row.times.arrived = row.times.arrived or time.perf_counter()
        self.loop.scheduler.add(row)

    def cancel(self, row: Row) -> None:
        """End a request, wherever it is."""
        if row.ended:
            return
        row.cancelled = True
        if self.loop.scheduler.drop(row):
            row.finish("cancelled", _none_was_read, _no_numbers())
        elif row.slot is not None and self.slots.rows[row.slot] is row:
            self.slots.cancel(row)
            self.loop.release()

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return self.loop.scheduler.waiting

    def holds(self, prompt_tokens: int, new_tokens: int) -> bool:
        """Whether slots are as large as for such prompts and answers, and not much larger."""
        sizes = self.sizes
        room = not self.policy.grows or min(new_tokens, self.lm.config.max_position) <= sizes.new_capacity
        return room and sizes.prompt_capacity // 4 < prompt_tokens <= sizes.prompt_capacity

    def warm(self, then: Sequence[Row] = (), going_on: Callable[[], bool] = lambda: True) -> int | None:
        """Compile everything that requests without a cache or context need; how many programs that were.

        Args:
          then: requests that are added afterwards.
          going_on: asked between two programs; when it says no, all the rest is left, and None returned.
        """
        before, levels = self.clock.programs, range(len(self.slots.levels))
        found = buckets(self.sizes.prompt_capacity)
        for bucket, below in zip(found, [0, *found], strict=False):
            for count in (1, read_together(bucket, self.sizes.slots // self.slots.shards)):
                for level in levels:  # the shortest prompt of the bucket, which smaller slots have room for
                    if not going_on():
                        return None
                    self.slots.least_level = level
                    self.slots.move(level)
                    self._run_dummies(count * self.slots.shards, below + 1, 3)
        self.slots.least_level = 0
        for level in itertools.chain(*((a, b) for a in levels for b in levels)):
            self.slots.move(level)
        self.slots.move(0)
        for row in then:
            self.add(row)
        return self.clock.programs - before

    def step_seconds(self, tokens: int = 64) -> float:
        """The seconds of a decode step of all slots, whose rows have read ``tokens`` and generate as many."""
        with self._dummies(self.sizes.slots, tokens, 2 * MOST_STEPS) as rows:
            while any(not row.tokens for row in rows):
                self.loop.iterate()
            seconds = []
            for _ in range(3):
                began = time.perf_counter()
                made = self.slots.decode(_TIMED_STEPS, 1)
                seconds.append((time.perf_counter() - began) / made)
        return sorted(seconds)[1]

    def _run_dummies(self, count: int, tokens: int, new: int) -> None:
        with self._dummies(count, tokens, new):
            while not self.loop.idle:
                self.loop.iterate()

    @contextlib.contextmanager
    def _dummies(self, count: int, tokens: int, new: int) -> Iterator[list[Row]]:
        """Requests of nobody, in an engine that is idle; they are gone afterwards."""
        if not self.loop.idle:
            raise UsageError("The engine is at work; warm it up before.")
        options = GenerationOptions(policy=self.policy.named, storage=self.storage, max_new_tokens=new, chat=False)
        tokens = min(tokens, self.lm.config.max_position - self.sizes.context - 1)
        request = Request(self.lm, [0] * max(tokens, 1), options, cache=self.slots.common, exact=True)
        request.stop_ids = ()
        rows = [self.slots.row_of(request, limit=new) for _ in range(count)]
        for row in rows:
            self.add(row)
        try:
            yield rows
        finally:
            for row in rows:
                self.cancel(row)

    def close(self) -> None:
        """Free the slots."""
        close_clock(self.clock)
        self.slots.free()


def engine_policy(lm: Any, policy: Policy | str | None) -> Policy:
    """The policy of an engine's slots; ``best`` is that of questions in view.

    Raises:
      UsageError: it cannot run on the model, or is one of rounds.
    """
    check_model(lm)
    asked = resolve(Full() if policy is None else parse(policy), lm.config, later=False).policy
    chosen = for_model(as_told(lm, asked), lm.config)
    if chosen.offloads_rounds:
        raise UsageError(
            f"{type(chosen.chosen).__name__} keeps rounds of each conversation in host memory and chooses among them "
            "for each question, so its rows have no slots of one size; use it with kvjax.generate or kvjax.Chat."
        )
    check_value(chosen)
    chosen.check(lm.config)
    return chosen


def spans_processes(lm: LanguageModel) -> bool:
    """Whether a model is on devices of several processes, whose schedules would differ."""
    return lm.mesh is not None and len({device.process_index for device in lm.mesh.jax.devices.flat}) > 1


def _none_was_read() -> Any:
    raise UsageError("The request was cancelled before it was read, so it has no cache.")


def _no_numbers() -> dict[str, Any]:
    sizes = ("cache", "device_cache", "device_peak", "live_cache", "full_cache")
    zeros: dict[str, Any] = {f"{name}_bytes": 0 for name in sizes}
    return zeros | {"compile_seconds": 0.0, "clipped": 0, "retained": (), "seen": 0}
