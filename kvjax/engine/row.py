"""A request in the engine: what was asked, where it is, what it has, and when that came."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from kvjax.cache.continuation import Continuation
from kvjax.engine.engine_report import RequestMetrics
from kvjax.output import Output, Stats
from kvjax.request import Request
from kvjax.text.detokenizer import text_of


@dataclasses.dataclass
class Timestamps:
    """Seconds of a clock at which a request arrived, its prefill started, its first token came, and it finished."""

    arrived: float = 0.0
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclasses.dataclass(eq=False)
class Row:
    """One request.

    Attributes:
      request: checked, of one prompt.
      number: draws its tokens, beside the seed. limit: tokens it may generate.
      keep_cache: whether its output has a cache.
      kind, together: see :class:`kvjax.engine.schedule.Schedulable`.
      on_change: called after each of its changes, by the thread that runs the engine.
      slot, tokens, logprobs, reason: where it is and what it has generated; ``reason`` once it has ended.
      capacity: tokens that it may generate in its slot. free: tokens that it may read after its prompt, of each size
        that slots may have.
      cancelled: whether it was called off. stops: whether the slots' stop table holds its strings.
      output, error: of which one is there in the end.
      times: when what happened. gaps: (seconds since the tokens before, tokens) of each delivery.
    """

    request: Request
    kind: Hashable
    together: int
    number: int = 0
    limit: int = 0
    keep_cache: bool = False
    on_change: Callable[[Row], None] = lambda row: None
    slot: int | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[float | None] | None = None
    reason: str | None = None
    capacity: int = 0
    free: tuple[int, ...] = ()
    cancelled: bool = False
    stops: bool = False
    output: Output | None = None
    error: BaseException | None = None
    times: Timestamps = dataclasses.field(default_factory=Timestamps)
    gaps: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    _last: float = 0.0

    @property
    def prompt(self) -> tuple[int, ...]:
        """The ids that are read for it alone."""
        return self.request.prompts[0]

    @property
    def fresh(self) -> bool:
        """Whether nothing comes before its prompt."""
        return self.request.cache is None and not self.request.context

    @property
    def prompt_tokens(self) -> int:
        """Tokens that it read: those of its context too."""
        return len(self.prompt) + len(self.request.context)

    @property
    def ended(self) -> bool:
        return self.output is not None or self.error is not None

    @property
    def most(self) -> int:
        """Tokens that it may generate."""
        return min(self.limit, self.capacity)

    def metrics(self) -> RequestMetrics:
        """The numbers that a report keeps of a row."""
        at = self.times
        times = at.arrived, at.started, at.first_token, at.finished
        return RequestMetrics(self.slot, *times, self.prompt_tokens, len(self.tokens), tuple(self.gaps), self.reason)

    def add(self, tokens: list[int], logprobs: list[float]) -> None:
        """Take over tokens that were generated."""
        now = time.perf_counter()
        if tokens:
            if self.times.first_token is None:
                self.times.first_token = now
            else:
                self.gaps.append((now - self._last, len(tokens)))
            self._last = now
        self.tokens += tokens
        self.logprobs += logprobs

    def fail(self, error: BaseException) -> None:
        """End it by an error."""
        self.error, self.times.finished = error, time.perf_counter()
        self.request.cache = None  # nobody goes on with it here
        self.on_change(self)

    def finish(self, reason: str, cache: Callable[[], Continuation], numbers: dict[str, Any]) -> None:
        """End it with what there is.

        Args:
          cache: gives its cache, or says why there is none.
          numbers: of :class:`kvjax.Stats`, those of bytes and slots.
        """
        self.reason, self.times.finished = reason, time.perf_counter()
        options = self.request.options
        self.output = Output(
            text=text_of(self.request.lm.tokenizer, self.tokens, options.stop_strings),
            tokens=tuple(self.tokens),
            finish_reason=reason,
            logprobs=tuple(self.logprobs) if options.logprobs else None,
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
            stats=self._stats(numbers),
            _cache=cache,
        )
        self.request.cache = None  # nobody goes on with it here
        self.on_change(self)

    def _stats(self, numbers: dict[str, Any]) -> Stats:
        at = self.times
        started, finished = at.started or at.arrived, at.finished or at.arrived
        first = finished if at.first_token is None else at.first_token
        reading, decoding = first - started, finished - first
        if at.started is None:  # called off before it was read
            reading = 0.0
        decoded = max(len(self.tokens) - 1, 0)
        return Stats(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=len(self.tokens),
            prompt_seconds=reading,
            decode_seconds=decoding,
            time_to_first_token=first - at.arrived,
            prompt_tokens_per_second=self.prompt_tokens / reading if reading > 0 else 0.0,
            decode_tokens_per_second=decoded / decoding if decoding > 0 else 0.0,
            repeated_tokens=self.request.repeated_tokens(0),
            **numbers,
        )


def present(rows: list[Row | None], vocabulary: int) -> np.ndarray:
    """[N, V] the tokens of each row's prompt, for the repetition penalty."""
    found = np.zeros((len(rows), vocabulary), bool)
    for i, row in enumerate(rows):
        if row is not None:
            found[i, [*row.request.context, *row.prompt]] = True
    return found
