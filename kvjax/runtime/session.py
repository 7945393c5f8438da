"""The host side of one generation: prompts in buckets, prefill, chunks of tokens, growing caches, times."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.buckets import NEW_TOKENS, new_bucket, prompt_bucket
from kvjax.cache.cache import Cache, detach, take
from kvjax.cache.host_memory import as_numpy
from kvjax.cache.quantisation import MODEL, Storage
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.runtime.compilation import CompileClock
from kvjax.runtime.decode import CHUNK, REASONS, RUNNING, Controls, DecodeState
from kvjax.runtime.interrupt import Interrupt
from kvjax.runtime.programs import ONE_DEVICE, Programs


@dataclasses.dataclass
class Times:
    """Seconds of the parts of a call, compilation taken out."""

    prompt: float = 0.0
    first: float = 0.0
    decode: float = 0.0


@dataclasses.dataclass(frozen=True)
class ChunkResult:
    """Tokens one chunk gave each row (fewer once a row has ended), their log-probabilities, and why rows ended."""

    tokens: list[list[int]]
    logprobs: list[list[float]] | None
    reasons: list[str | None]


def read_prompts(
    params: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    policy: Policy,
    cache: Cache | None,
    consume: bool,
    dtype: Any,
    storage: Storage = MODEL,
    programs: Programs = ONE_DEVICE,
) -> tuple[Cache, jax.Array]:
    """Prefill prompts of different lengths as one batch, onto ``cache`` when there is one.

    Returns:
      The cache and the logits [B, V] after each row's last token; on a mesh B may be more than there are prompts.
    """
    config = params.config
    padding = programs.rows(len(prompts)) - len(prompts)
    # A row of padding is one token, or nothing new of another row's cache.
    prompts = [*prompts, *([prompts[0][:1]] if cache is None else [()]) * padding]
    if cache is not None and cache.batch < len(prompts):
        wide = take(cache, [*range(cache.batch), *[0] * padding])
        if consume:
            jax.tree.map(lambda pool: pool.delete(), detach(cache)[0])
        cache, consume = wide, True
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    seen = np.zeros_like(lengths) if cache is None else as_numpy(cache.seen)
    total = seen + lengths
    # A bounded cache stays as it is allocated, so one program serves all turns of a conversation.
    room = prompt_bucket(int(total.max())) if cache is None or policy.replans else cache.prompt_capacity
    logits = None
    for start, size in _chunks(policy, config, int(lengths.max())):
        count = np.clip(lengths - start, 0, size)
        bucket = prompt_bucket(int(count.max()))
        tokens = np.zeros((len(prompts), bucket), np.int32)
        for row, ids in enumerate(prompts):
            tokens[row, : count[row]] = ids[start : start + count[row]]
        read = tokens, count, total
        rooms = {"prompt_capacity": room, "new_capacity": NEW_TOKENS}
        if cache is None:
            cache, new = programs.fresh(params, *read, policy=policy, dtype=dtype, storage=storage, **rooms)
        else:
            cache, new = programs.onto(params, cache, *read, consume=consume, **rooms)
        consume = True  # from the second chunk on the cache is this function's own
        logits = new if logits is None else jnp.where(count[:, None] > 0, new, logits)
    assert cache is not None and logits is not None  # there is at least one chunk
    return cache, logits


def _chunks(policy: Policy, config: ModelConfig, longest: int) -> Iterator[tuple[int, int]]:
    """(start, size) of the chunks a policy reads prompts in."""
    sizes = policy.chunks(config)
    if sizes is None:
        yield 0, longest
        return
    start, size = 0, sizes[0]
    while start < longest:
        yield start, size
        start, size = start + size, sizes[1]


class Session:
    """One batch being generated: owns its cache, hands out what each chunk gave.

    Python state lives here and only here; everything compiled is a pure function of arrays.
    """

    def __init__(
        self,
        params: Decoder,
        controls: Controls,
        clock: CompileClock,
        interrupt: Interrupt,
        programs: Programs = ONE_DEVICE,
        may_grow: Callable[[Cache, int], bool] = lambda cache, new_capacity: True,
    ):
        self.params, self.controls, self.programs = params, controls, programs
        self.times = Times()
        #: Why rows that have not ended go no further.
        self.cut = "interrupted"
        self._clock, self._interrupt, self._may_grow = clock, interrupt, may_grow
        self._state: DecodeState | None = None
        self._fed = self._rows = 0
        self._began, self._compiled = time.perf_counter(), clock.seconds

    def _lap(self) -> float:
        """Seconds since the last lap without compilation; compilation may overlap other threads' work, never us."""
        now, compiled = time.perf_counter(), self._clock.seconds
        spent = max(now - self._began - (compiled - self._compiled), 0.0)
        self._began, self._compiled = now, compiled
        return spent

    @property
    def cache(self) -> Cache:
        assert self._state is not None
        return self._state.cache

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, read: Callable[..., Any] | None = None, **options: Any
    ) -> Any:
        """Read prompts, as :func:`read_prompts` (or as ``read`` does); timed."""
        if read is None:
            found = read_prompts(self.params, prompts, programs=self.programs, **options)
        else:
            found = read(self.params, prompts, **options)
        result = jax.block_until_ready(found)
        spent = self._lap()
        self.times.prompt += spent
        self.times.first += spent
        return result

    def start(self, cache: Cache, logits: jax.Array, present: np.ndarray, logprobs: bool) -> ChunkResult:
        """Take over the cache and sample the first token of every row; ``present`` has no rows of padding."""
        self._rows = len(present)
        self._state = self.programs.first(cache, logits, present, self.controls, logprobs=logprobs)
        result = self._collect(1)
        self.times.first += self._lap()
        return result

    def chunks(self, steps: int) -> Iterator[ChunkResult]:
        """Generate ``steps`` tokens a chunk (at most CHUNK) until every row has ended, Ctrl-C is pressed, or the cache
        would have to grow to what does not fit.
        """
        while not self._interrupt.requested:
            state = self._state
            assert state is not None
            if not (as_numpy(state.reason) == RUNNING).any():
                return
            cache = state.cache
            room = cache.new_capacity - self._fed if cache.policy.grows else CHUNK
            if room <= 0:
                config = self.params.config
                larger = new_bucket(self._fed, config.max_position)
                if not self._may_grow(cache, larger):
                    self.cut = "memory"
                    return
                bigger = self.programs.grow(cache, config=config, new_capacity=larger)
                state = dataclasses.replace(state, cache=bigger)
                room = bigger.new_capacity - self._fed
            # The old state's pools are donated: from here on only the new one exists.
            self._state, made = self.programs.chunk(self.params, state, self.controls, min(steps, room, CHUNK))
            result = self._collect(int(made))
            self._fed += int(made)
            self.times.decode += self._lap()
            yield result

    def _collect(self, made: int) -> ChunkResult:
        state = self._state
        assert state is not None
        tokens = as_numpy(state.tokens)[: self._rows, :made]
        reasons = [REASONS.get(int(reason)) for reason in as_numpy(state.reason)[: self._rows]]
        kept = [[int(t) for t in row if t >= 0] for row in tokens]
        logprobs = None
        if state.logprobs is not None:
            values = as_numpy(state.logprobs)[:, :made]
            logprobs = [values[i][tokens[i] >= 0].tolist() for i in range(len(kept))]
        return ChunkResult(kept, logprobs, reasons)


def spread(cache: Cache, logits: jax.Array | None, copies: Sequence[int]) -> tuple[Cache, jax.Array | None]:
    """Rows of a cache, and of its logits, in the given order; for one context under many prompts and for n > 1."""
    if list(copies) == list(range(cache.batch)):
        return cache, logits
    return take(cache, copies), None if logits is None else logits[jnp.asarray(copies, jnp.int32)]
