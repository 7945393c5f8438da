"""The host side of one call of ``generate``: prompts read, tokens generated chunk by chunk, outputs made."""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Protocol, Self

import jax
import numpy as np

from kvjax import progress
from kvjax.allocation import spare_beside_context, spare_tokens
from kvjax.cache.buckets import new_bucket, request_bucket
from kvjax.cache.cache import Cache
from kvjax.cache.continuation import Continuation, check_continuable, may_be_lent, rolled_back
from kvjax.cache.host_memory import as_numpy, device_bytes, live_on_device
from kvjax.interrupt import BrokenOff, Interrupt, interruptible
from kvjax.memory_needs import full_cache_bytes
from kvjax.model.decoder import Decoder
from kvjax.output import Output, Stats
from kvjax.policies.composition import has_own, retained_on_host
from kvjax.policies.guard import check_kept, layers_of
from kvjax.request import Request
from kvjax.rounds.stats import RoundStats
from kvjax.rounds.strategy import RoundStrategy
from kvjax.runtime import prefill_speed
from kvjax.runtime.alike_layers import compiles_faster_by_layers
from kvjax.runtime.compilation import CompileClock, compile_clock
from kvjax.runtime.decode import CHUNK, REASONS, RUNNING, DecodeState
from kvjax.runtime.prefill_batches import Note, TokenStrategy
from kvjax.text.detokenizer import text_of
from kvjax.waiting import ready

#: Seconds that a chunk of tokens may take, and the steps that show how long one takes.
_CHUNK_SECONDS, _FIRST_STEPS = 0.5, 4


class Strategy(Protocol):
    """How a session prefills its prompts, and which caches it leaves.

    Attributes:
      prompt_logprobs: of each prompt that was read, those of its tokens where they were asked for.
    """

    prompt_logprobs: list[list[float | None]] | None

    def programs(self, request: Request, params: Decoder) -> tuple[list[str], list[str]]:
        """Names of the programs that reading and finishing need."""
        ...

    def read(self, params: Decoder, request: Request, consume: bool, note: Note) -> tuple[Cache, jax.Array]:
        """A cache to decode on, with a row per sample, and the logits [B, V] after each prompt.

        ``consume`` donates ``request.cache``; ``note`` is told of every newer cache.
        """
        ...

    def finish(self, cache: Cache, fed: Sequence[Sequence[int]], note: Note) -> Continuation:
        """The cache or conversation for a later call; ``fed`` are the tokens that each row has read in this one."""
        ...

    def stats(self, row: int) -> RoundStats | None:
        """The statistics of a finished row's rounds, if there are rounds."""
        ...


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


class Session:
    """One batch being generated: owns its cache, hands out what each chunk gave, makes the outputs.

    Python state lives here and only here; everything compiled is a pure function of arrays. Used as a context, it
    gives back a conversation that it was lent when the call fails or is abandoned.

    Attributes:
      tokens, logprobs, reasons: of each row so far.
      times: seconds of the call's parts.
      peak_bytes: the most that arrays held on each device between two programs of the call; those from before the call
        count only if they are what it continues.
    """

    def __init__(self, request: Request, clock: CompileClock, interrupt: Interrupt):
        self.request, self.controls, self.programs = request, request.controls(), request.programs
        self.strategy: Strategy = RoundStrategy() if request.policy.offloads_rounds else TokenStrategy()
        self.tokens: list[list[int]] = [[] for _ in range(request.rows)]
        self.logprobs: list[list[float]] | None = [[] for _ in self.tokens] if request.options.logprobs else None
        self.reasons: list[str | None] = [None] * request.rows
        self.times, self.peak_bytes = Times(), 0
        self._clock, self._interrupt = clock, interrupt
        self._cut = "interrupted"  # why rows that have not ended go no further
        self._cache: Cache | None = None
        self._logits: jax.Array | None = None
        self._fed = 0
        self._lent: Continuation | None = None
        held = () if request.cache is None else jax.tree.leaves(request.cache.device_layers)
        continued = set(map(id, held))
        # Weak, and no sum: what was there may be freed while the call runs, such as a model that was replaced.
        self._before = [weakref.ref(x) for x in live_on_device() if id(x) not in continued]
        self._began, self._compiled = time.perf_counter(), clock.seconds

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._interrupt.requested

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and self._lent is not None and self.request.owned is not None:
            newest = self._cache if self._cache is not None else self._lent.device_layers
            self.request.owned.give_back(rolled_back(self._lent, newest))

    def _lap(self) -> float:
        """Seconds since the last lap without compilation; compilation may overlap other threads' work, never us."""
        now, compiled = time.perf_counter(), self._clock.seconds
        spent = max(now - self._began - (compiled - self._compiled), 0.0)
        self._began, self._compiled = now, compiled
        return spent

    def _note(self, cache: Cache) -> None:
        self._cache = cache
        before = {id(x) for known in self._before if (x := known()) is not None}
        self.peak_bytes = max(self.peak_bytes, device_bytes(x for x in live_on_device() if id(x) not in before))

    @property
    def cache(self) -> Cache:
        """The rows as they are now."""
        assert self._cache is not None, "prompts are read first"
        return self._cache

    def prefill(self, consume: bool = False, params: Decoder | None = None) -> None:
        """Read the prompts, by the model or by ``params``; ``consume`` donates what they are read onto."""
        request, owned = self.request, self.request.owned
        if request.cache_is_copy:
            if consume:
                request.given.delete()
            consume = True
        elif owned is not None and may_be_lent(owned.value) and not owned.shared and request.n == 1:
            self._lent, consume = owned.lend(), True
        if request.cache is not None:
            check_continuable("cache=", [request.cache])  # a stream may begin long after its request was checked
        self._compile_ahead()
        with self._reading() as stage:
            found = self.strategy.read(params or request.lm.params, request, consume, self._note)
            self._cache, self._logits = ready(found)
            seconds = stage.seconds
        self._note(self.cache)
        if has_own(request.policy.chosen) and not request.policy.offloads_rounds:
            self._check_kept(retained_on_host(request.policy, self.cache.layers))
        spent = self._lap()
        if (place := progress.current()).visible:  # then compilation is no part of the stage
            prefill_speed.note(request.lm.config, self._work(), seconds, keep=place.drawn)
        self.times.prompt += spent
        self.times.first += spent

    def _check_kept(self, retained: list[np.ndarray], decoded: bool = False) -> None:
        """Refuse a policy that kept what cannot be; see ``kvjax/policies/guard.py``."""
        request, rows = self.request, self.request.rows
        layers = layers_of(self.cache, request.policy, request.lm.mesh is not None)
        own = [kept[:rows] for kept in retained]
        check_kept(request.policy, layers, own, as_numpy(self.cache.seen)[:rows], request.lm.config, decoded)

    def _compile_ahead(self) -> None:
        """Begin to compile what follows the first prefill: a decode loop takes longer to compile than a prefill."""
        request, policy = self.request, self.request.policy
        several = request.rows > 1 and (bool(request.context) or request.n > 1)  # rows are copied in between
        if request.cache is not None or several or policy.offloads_rounds or request.options.max_new_tokens == 0:
            return
        onto = request_bucket(len(request.prompts[0])) if request.context else None
        by_layers = compiles_faster_by_layers(policy, request.lm.config, request.lm.mesh)
        if by_layers or policy.chunks(request.lm.config) is not None or request.prompt_logprobs:
            onto = None  # layers take little time to compile, chunks have sizes of their own, and scores a program
        self.programs.compile_ahead(
            request.lm.params,
            policy,
            self._present(),
            request.forced(self.controls, 0),
            onto=onto,
            dtype=request.dtype,
            storage=request.storage,
            prompt_capacity=request.size.prompt_capacity,
            new_capacity=request.size.new_capacity,
        )

    def _reading(self) -> AbstractContextManager[progress.Stage]:
        """The stage that prompts are read in, and the programs that the call needs from there on."""
        request, most = self.request, self.request.options.max_new_tokens
        before, after = self.strategy.programs(request, request.lm.params)
        progress.current().announce([*before, *["decode_chunk"] * (most > 0), *after])
        expected = prefill_speed.expected_seconds(request.lm.config, self._work())
        return progress.stage("prefill", total=self._read_tokens(), expected=expected)

    def _read_tokens(self) -> int:
        """Tokens that are read before the first is generated, all prompts together."""
        return sum(len(ids) for ids in self.request.prompts) + len(self.request.context)

    def _work(self) -> float:
        """The work of reading them, for estimates of its time."""
        request, config = self.request, self.request.lm.config
        longest, context = max(map(len, request.prompts)), len(request.context)
        held = 0
        if request.cache is not None:
            held = request.cache.nbytes // request.cache.batch // full_cache_bytes(config, 1, request.dtype)
            held = min(held, int(as_numpy(request.cache.seen).max()))
        prompts = prefill_speed.work(config, len(request.prompts), longest, held + context)
        return prompts + prefill_speed.work(config, 1, context)

    def results(self, steps: int) -> Iterator[ChunkResult]:
        """Results of :meth:`chunks`; Ctrl-C while the next chunk is compiled ends them with the tokens so far."""
        try:
            yield from self.chunks(steps)
        except BrokenOff:
            if not any(self.tokens):
                raise

    def _paced(self, steps: int) -> int:
        """Fewer steps where they are slow: Ctrl-C waits for a chunk to end. Processes of one mesh must not differ."""
        if jax.process_count() > 1:
            return steps
        if self._fed == 0:
            return min(steps, _FIRST_STEPS)
        return max(1, min(steps, int(_CHUNK_SECONDS * self._fed / max(self.times.decode, 1e-6))))

    def chunks(self, steps: int) -> Iterator[ChunkResult]:
        """The first token of every row, then ``steps`` at a time (at most CHUNK) until every row has ended, Ctrl-C is
        pressed, or the cache would have to grow to what does not fit.
        """
        request = self.request
        if request.options.max_new_tokens == 0:
            self.reasons = ["length"] * request.rows
            return
        assert self._logits is not None
        spare = self._spare()
        state = self.programs.begin(request.lm.config, self.cache, self._logits, self._present())
        self._logits = None
        controls = request.forced(self.controls, 0)
        state, made = self.programs.chunk(request.lm.params, state, controls, 1)
        self._cache = state.cache  # the one before is consumed, whatever comes next
        ready((state, made), breakable=False)
        yield self._collect(state, 1)
        while not self._interrupt.requested and (as_numpy(state.reason) == RUNNING).any():
            cache = state.cache
            room = cache.new_capacity - self._fed if cache.policy.grows else CHUNK
            room += spare
            if room <= 0:
                config = request.lm.config
                larger = new_bucket(self._fed - spare, config.max_position)
                if not request.may_grow(cache, larger):
                    self._cut = "memory"
                    return
                grown = self.programs.grow(cache, config=config, new_capacity=larger)
                state = dataclasses.replace(state, cache=grown)
                self._note(state.cache)
                room = state.cache.new_capacity - self._fed + spare
            cache = grown = None  # the old state's pools are donated: from here on only the new one exists
            steps_now = min(self._paced(steps), room, CHUNK)
            controls = request.forced(self.controls, 1 + self._fed)
            state, made = self.programs.chunk(request.lm.params, state, controls, steps_now)
            self._cache = state.cache
            ready((state, made), breakable=False)
            self._fed += int(made)
            yield self._collect(state, int(made))

    def _spare(self) -> int:
        """Tokens that may be decoded beside the cache's new capacity: prompts were shorter than there is room for."""
        cache, config = self.cache, self.request.lm.config
        if not cache.policy.grows or self.request.options.max_new_tokens <= cache.new_capacity:
            return 0  # nobody will ask
        if cache.context is not None:
            own = as_numpy(cache.seen)[: self.request.rows].max() - as_numpy(cache.context.seen)[0]
            return spare_beside_context(cache.policy, cache.own_capacity or 0, int(own))
        lengths = (length[: self.request.rows].max(axis=0) for length in cache.lengths)
        return spare_tokens(config, cache.policy, cache.prompt_capacity, list(lengths))

    def _collect(self, state: DecodeState, made: int) -> ChunkResult:
        """Take over the state after a chunk; what it gave the rows that are no padding."""
        first, self._cache = self._fed == 0, state.cache
        found = as_numpy(state.tokens)[: self.request.rows, :made]
        self.reasons = [REASONS.get(int(reason)) for reason in as_numpy(state.reason)[: self.request.rows]]
        tokens = [[int(t) for t in row if t >= 0] for row in found]
        logprobs = None
        if self.logprobs is not None:
            values = as_numpy(state.logprobs)[:, :made]
            logprobs = [values[i][found[i] >= 0].tolist() for i in range(len(tokens))]
        for row, new in enumerate(tokens):
            self.tokens[row].extend(new)
            if self.logprobs is not None and logprobs is not None:
                self.logprobs[row].extend(logprobs[row])
        spent = self._lap()
        if first:
            self.times.first += spent
        else:
            self.times.decode += spent
        return ChunkResult(tokens, logprobs, self.reasons)

    def _present(self) -> np.ndarray:
        """[rows, V] which tokens each row's prompt holds, for the repetition penalty."""
        request = self.request
        present = np.zeros((request.rows, request.lm.config.vocab_size), bool)
        for row in range(request.rows):
            present[row, [*request.context, *request.prompts[row // request.n]]] = True
        return present

    @property
    def logits(self) -> jax.Array:
        """[B, V] after each prompt, rows of padding last; until the first token is drawn."""
        assert self._logits is not None, "prompts are read first, and no token was drawn"
        return self._logits

    def continuation(self) -> Continuation:
        """The cache or conversation that a later call continues, with a row per sample."""
        request, next_token = self.request, as_numpy(self.cache.next_token)
        fed = [[*request.prompts[row // request.n], *made] for row, made in enumerate(self.tokens)]
        fed = [ids[:-1] if next_token[row] >= 0 else ids for row, ids in enumerate(fed)]
        return self.strategy.finish(self.cache, fed, self._note)

    def outputs(self) -> Any:
        """Outputs in the shape of what was passed."""
        self._interrupt.finishing = True
        request, cache, n = self.request, self.cache, self.request.n
        own = retained_on_host(request.policy, cache.layers)
        counters = own, cache.shared_lengths, as_numpy(cache.seen), cache.clipped
        self._check_kept(own, decoded=self._fed > 0)
        left = self.continuation()
        rows = [self._output(row, cache, left, *counters) for row in range(request.rows)]
        if any(row.finish_reason == "interrupted" for row in rows):
            self._interrupt.answered = True
        grouped = [rows[i] if n == 1 else rows[i * n : (i + 1) * n] for i in range(len(rows) // n)]
        return grouped[0] if request.tokens.single else grouped

    def _output(self, row: int, cache: Cache, left: Continuation, *counters: Any) -> Output:
        request = self.request
        tokens = tuple(self.tokens[row])
        return Output(
            text=text_of(request.lm.tokenizer, tokens, request.options.stop_strings),
            tokens=tokens,
            finish_reason=self.reasons[row] or self._cut,
            logprobs=None if self.logprobs is None else tuple(self.logprobs[row]),
            prompt_logprobs=self._prompt_logprobs(row),
            stats=self._stats(row, cache, *counters),
            _cache=functools.partial(left.row, row),
        )

    def _prompt_logprobs(self, row: int) -> tuple[float | None, ...] | None:
        found = self.strategy.prompt_logprobs
        return None if found is None else tuple(found[row // self.request.n])

    def _stats(
        self,
        row: int,
        cache: Cache,
        own: list[np.ndarray],
        shared: list[np.ndarray],
        seen: np.ndarray,
        clipped: np.ndarray,
    ) -> Stats:
        request, times = self.request, self.times
        read = self._read_tokens()
        decoded = sum(max(len(tokens) - 1, 0) for tokens in self.tokens)
        retained = tuple(tuple(map(int, layer[row] + held)) for layer, held in zip(own, shared, strict=True))
        live = sum(int(np.dot(size, layer[row])) for size, layer in zip(cache.slot_bytes, own, strict=True))
        context, rounds = cache.context, self.strategy.stats(row)
        # Of a context that rows share an equal part is each one's; rows of padding have none.
        shared_bytes, shared_live = (0, 0) if context is None else (context.nbytes, context.live_nbytes)
        own_bytes = (cache.nbytes - shared_bytes) // cache.batch
        return Stats(
            prompt_tokens=len(request.prompts[row // request.n]) + len(request.context),
            generated_tokens=len(self.tokens[row]),
            prompt_seconds=times.prompt,
            decode_seconds=times.decode,
            compile_seconds=self._clock.seconds,
            time_to_first_token=times.first,
            prompt_tokens_per_second=read / times.prompt if times.prompt > 0 else 0.0,
            decode_tokens_per_second=decoded / times.decode if times.decode > 0 else 0.0,
            cache_bytes=own_bytes + shared_bytes // request.rows,
            device_cache_bytes=cache.device_nbytes,
            device_peak_bytes=self.peak_bytes,
            live_cache_bytes=live + shared_live // request.rows,
            shared_cache_bytes=0 if context is None else device_bytes(jax.tree.leaves(context)),
            full_cache_bytes=full_cache_bytes(request.lm.config, int(seen[row]), request.dtype),
            clipped=int(clipped[row]),
            retained=retained,
            seen=int(seen[row]),
            repeated_tokens=request.repeated_tokens(row // request.n),
            windows=request.lm.config.windows_by_layer,
            choice=request.choice,
            rounds=rounds and dataclasses.replace(rounds, allocated=cache.device_nbytes, peak=self.peak_bytes),
        )


@contextmanager
def running(request: Request) -> Iterator[Session]:
    """A session whose progress is shown, whose compilations are counted, and which Ctrl-C ends."""
    with (
        progress.showing(request.options.progress),
        compile_clock() as clock,
        interruptible() as interrupt,
        Session(request, clock, interrupt) as session,
    ):
        yield session
