"""The measurements: every candidate of a case is timed in turn, round after round, and medians are reported.

Interleaving matters more than repetition: on a shared machine the speed drifts by tens of percent within a minute,
and only times taken side by side can be divided by each other.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from kvjax.bench import machine
from kvjax.cache import Cache
from kvjax.checks import whole_number
from kvjax.errors import UsageError
from kvjax.generation import generate
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder
from kvjax.policies import Policy
from kvjax.policies.best import resolve
from kvjax.runtime.synthetic import benchmark_controls, decode_state, filled_cache, run_steps, weight_bytes_per_step

if TYPE_CHECKING:
    from kvjax.checkpoints.load import LanguageModel

Progress = Callable[[str], None]


class Peer(Protocol):
    """Another library that a run is timed beside; caches are its own.

    ``name`` is its row in the tables, and ``about`` a clause of what runs there.
    """

    name: str
    about: str

    def filled_cache(self, batch: int, context: int) -> Any:
        """A cache as after a prompt of ``context`` tokens."""
        ...

    def decode_seconds(self, cache: Any, batch: int, context: int, steps: int) -> float:
        """Seconds of one greedy step, over ``steps`` of them."""
        ...

    def prefill_seconds(self, tokens: np.ndarray) -> float:
        """Seconds until the first next token of a prompt, [B, T] ids; compilation apart."""
        ...

    def nbytes(self, cache: Any) -> int:
        """Bytes of what a cache holds."""
        ...


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    """One candidate at one batch and context; seconds are of one step, which makes ``batch`` tokens.

    ``cache_bytes`` and ``live_cache_bytes`` are those right after the prompt. ``step_bytes``, what a step must read, is
    the weights and the cache that was live in the middle of a round's steps, the mean of the rounds: a row grows, and
    between two compressions so does a compressed one. ``limit_fraction`` is (bytes a step must read / bandwidth) /
    seconds: 1 is the memory's own speed. The bandwidth of a round, in ``bandwidths``, is the mean of a reading before
    and one after its steps. Where the two are more than 15 % apart the machine changed its pace meanwhile: the fraction
    is the median of the other rounds, ``steady_rounds`` of them, unless all are such. ``peak_bytes`` is what the steps
    held at most beyond what was in use before the cache existed. The median leaves out the rare step in which a policy
    compresses while decoding; ``mean_step_seconds`` includes it. ``prefill_tokens_per_second`` is one reading of as
    many prompts of as many tokens, without compilation.
    """

    batch: int
    context: int
    candidate: str
    step_seconds: float
    mean_step_seconds: float
    rounds: tuple[float, ...]
    tokens_per_second: float
    cache_bytes: int
    live_cache_bytes: int
    step_bytes: int
    peak_bytes: int
    limit_fraction: float
    bandwidths: tuple[float, ...]
    steady_rounds: int
    prefill_tokens_per_second: float
    speedup_over_peer: float | None = None


@dataclasses.dataclass(frozen=True)
class PrefillRow:
    """One candidate at one prompt length, batch 1; seconds from token ids to the compressed cache and next token."""

    prompt_tokens: int
    candidate: str
    seconds: float
    rounds: tuple[float, ...]
    tokens_per_second: float
    peak_bytes: int
    speedup_over_peer: float | None = None


@dataclasses.dataclass(frozen=True)
class LongRow:
    """A decode step after few and after many generated tokens, timed in turn on the two caches."""

    policy: str
    few: int
    many: int
    few_seconds: float
    many_seconds: float
    ratio: float
    few_cache_bytes: int
    many_cache_bytes: int


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Something to measure: seconds of a step or of a prompt, or bytes per second."""

    name: str
    measure: Callable[[], float]
    cache_bytes: int = 0
    live_cache_bytes: int = 0
    peak_bytes: int = 0
    prefill_tokens_per_second: float = 0.0
    live_by_call: Sequence[int] = ()  # of ``measure``, where the cache grows; the last ones are the rounds'

    def live_by_round(self, rounds: int) -> list[int]:
        """Bytes of the live cache in the middle of each of the rounds' steps."""
        return list(self.live_by_call[-rounds:]) or [self.live_cache_bytes] * rounds


def interleave(candidates: Sequence[Candidate], rounds: int) -> dict[str, tuple[float, ...]]:
    """Measure every candidate once a round, in turn."""
    times: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for _ in range(rounds):
        for candidate in candidates:
            times[candidate.name].append(candidate.measure())
    return {name: tuple(values) for name, values in times.items()}


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the rounds' own ratios: what drifts between rounds cancels."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def limit_fraction(
    must_read: Sequence[int], seconds: Sequence[float], around: Sequence[tuple[float, float]]
) -> tuple[float, int]:
    """Median of the rounds' (bytes / bandwidth) / seconds, and of how many: those with a steady bandwidth, if any.

    Args:
      must_read: bytes of a step, for each round.
      seconds: of a step, one for each round.
      around: bytes per second right before and right after each round's steps.
    """
    rounds = zip(must_read, around, seconds, strict=True)
    fractions = [read / statistics.fmean(rates) / taken for read, rates, taken in rounds]
    steady = [fraction for fraction, rates in zip(fractions, around, strict=True) if min(rates) >= 0.85 * max(rates)]
    return statistics.median(steady or fractions), len(steady)


def check_request(config: ModelConfig, *, rounds: int, steps: int, long_steps: int = 0, **sizes: Sequence[int]) -> None:
    """Refuse what cannot be measured, before anything is."""
    whole_number("rounds", rounds, 1)
    whole_number("steps", steps, 1, 64)  # the tokens one compiled call makes
    whole_number("long_steps", long_steps, 0)
    for name, values in sizes.items():
        for value in values:
            whole_number(name, value, 1)
            if name in ("context", "prefill") and value > config.max_position:
                raise UsageError(f"{name} {value} is beyond the model's context of {config.max_position} tokens.")


class DecodeTimer:
    """Decode steps from a cache; the cache grows on from round to round, as it does in use.

    Attributes:
      live: bytes of the live cache in the middle of each call's steps.
    """

    def __init__(self, params: Decoder, cache: Cache, steps: int):
        self._params, self._steps = params, steps
        self._state = decode_state(params.config, cache)
        self._controls = benchmark_controls(params.config, cache.batch)
        self.live: list[int] = []

    def __call__(self) -> float:
        before = self._state.cache.live_nbytes
        self._state, seconds = run_steps(self._params, self._state, self._controls, self._steps)
        self.live.append((before + self._state.cache.live_nbytes) // 2)
        return seconds


class Bench:
    """A loaded model, its policies and an optional peer, measured case by case."""

    def __init__(
        self,
        lm: LanguageModel,
        policies: Mapping[str, Policy],
        *,
        rounds: int,
        steps: int,
        peer: Peer | None = None,
        progress: Progress = lambda _: None,
        meter: machine.BandwidthMeter | None = None,
    ):
        self.lm, self.rounds, self.steps = lm, rounds, steps
        self.policies = {name: resolve(policy, lm.config, later=False).policy for name, policy in policies.items()}
        self.peer, self.progress = peer, progress
        self.dtype = lm.params.dtype
        self.meter = meter or machine.BandwidthMeter()

    def decode(self, batch: int, context: int) -> list[DecodeRow]:
        """Every policy, and the peer, decoding from a cache filled with ``context`` tokens a row."""
        candidates = []
        for name, policy in self.policies.items():
            self.progress(f"decode: batch {batch}, context {context}, {name}")
            candidates.append(self._decoding(name, policy, batch, context))
        if self.peer is not None:
            self.progress(f"decode: batch {batch}, context {context}, {self.peer.name}")
            candidates.append(self._peer_decoding(self.peer, batch, context))
        reading = Candidate("", self.meter)
        times = interleave([reading, *(each for c in candidates for each in (c, reading))], self.rounds)
        weights = weight_bytes_per_step(self.lm.params)
        rows = []
        for at, c in enumerate(candidates):
            seconds = statistics.median(times[c.name])
            must_read = [weights + live for live in c.live_by_round(self.rounds)]
            turns = len(candidates) + 1
            around = list(zip(times[""][at::turns], times[""][at + 1 :: turns], strict=True))
            fraction, steady = limit_fraction(must_read, times[c.name], around)
            rows.append(
                DecodeRow(
                    batch=batch,
                    context=context,
                    candidate=c.name,
                    step_seconds=seconds,
                    mean_step_seconds=statistics.fmean(times[c.name]),
                    rounds=times[c.name],
                    tokens_per_second=batch / seconds,
                    cache_bytes=c.cache_bytes,
                    live_cache_bytes=c.live_cache_bytes,
                    step_bytes=round(statistics.fmean(must_read)),
                    peak_bytes=c.peak_bytes,
                    limit_fraction=fraction,
                    bandwidths=tuple(map(statistics.fmean, around)),
                    steady_rounds=steady,
                    prefill_tokens_per_second=c.prefill_tokens_per_second,
                    speedup_over_peer=self._over_peer(c.name, times),
                )
            )
        return rows

    def _decoding(self, name: str, policy: Policy, batch: int, context: int) -> Candidate:
        config, params = self.lm.config, self.lm.params
        read = generate(self.lm, self._prompts(batch, context), policy=policy, max_new_tokens=0)
        prefilled = read[0].stats.prompt_tokens_per_second
        del read
        room = max(256, (self.rounds + 2) * self.steps)

        def fill() -> Cache:
            return jax.block_until_ready(filled_cache(config, policy, batch, context, self.dtype, new_capacity=room))

        DecodeTimer(params, fill(), self.steps)()  # compiles; what that takes is not the case's memory
        before = machine.memory_in_use()
        cache = fill()
        sizes = cache.nbytes, cache.live_nbytes
        timer = DecodeTimer(params, cache, self.steps)
        with machine.watch_peak() as memory:
            timer()
        return Candidate(name, timer, *sizes, max(0, memory.peak - before), prefilled, timer.live)

    def _peer_decoding(self, peer: Peer, batch: int, context: int) -> Candidate:
        before = machine.memory_in_use()
        cache: Any = peer.filled_cache(batch, context)
        held = peer.nbytes(cache)

        def measure() -> float:
            return peer.decode_seconds(cache, batch, context, self.steps)

        with machine.watch_peak() as memory:
            measure()
        seconds = peer.prefill_seconds(np.asarray(self._prompts(batch, context)))
        return Candidate(peer.name, measure, held, held, max(0, memory.peak - before), batch * context / seconds)

    def _prompts(self, batch: int, tokens: int) -> list[list[int]]:
        return np.random.default_rng(0).integers(0, self.lm.config.vocab_size, (batch, tokens)).tolist()

    def _over_peer(self, name: str, times: Mapping[str, Sequence[float]]) -> float | None:
        if self.peer is None or name == self.peer.name:
            return None
        return median_ratio(times[self.peer.name], times[name])

    def prefill(self, prompt_tokens: int) -> list[PrefillRow]:
        """Every policy, and the peer, reading one prompt of random token ids."""
        (ids,) = self._prompts(1, prompt_tokens)
        measures: dict[str, Callable[[], float]] = {
            name: lambda policy=policy: self._prefill_seconds(ids, policy) for name, policy in self.policies.items()
        }
        if (peer := self.peer) is not None:
            measures[peer.name] = lambda: peer.prefill_seconds(np.asarray([ids]))
        candidates = []
        for name, measure in measures.items():
            self.progress(f"prefill: {prompt_tokens} tokens, {name}")
            measure()  # compiles
            before = machine.memory_in_use()
            with machine.watch_peak() as memory:
                measure()
            candidates.append(Candidate(name, measure, peak_bytes=max(0, memory.peak - before)))
        times = interleave(candidates, self.rounds)
        rows = []
        for c in candidates:
            median, over = statistics.median(times[c.name]), self._over_peer(c.name, times)
            rate = prompt_tokens / median
            rows.append(PrefillRow(prompt_tokens, c.name, median, times[c.name], rate, c.peak_bytes, over))
        return rows

    def _prefill_seconds(self, ids: list[int], policy: Policy) -> float:
        start = time.perf_counter()
        output = generate(self.lm, ids, policy=policy, max_new_tokens=0)
        jax.block_until_ready(output.cache)
        return time.perf_counter() - start

    def long(self, many: int, few: int = 100) -> list[LongRow]:
        """The step after ``few`` and ``many`` really generated tokens, batch 1, for policies of a bounded cache."""
        prompt = np.random.default_rng(0).integers(0, self.lm.config.vocab_size, 256).tolist()
        rows = []
        for name, policy in self.policies.items():
            if policy.grows:
                self.progress(f"long: {name} is left out, its cache grows with what it generates")
                continue
            candidates = []
            for count in (few, many):
                self.progress(f"long: generating {count} tokens, {name}")
                output = generate(
                    self.lm, prompt, policy=policy, max_new_tokens=count, stop_token_ids=(), temperature=1.0
                )
                held = output.cache.nbytes
                timer = DecodeTimer(self.lm.params, output.cache, self.steps)
                timer()  # compiles
                candidates.append(Candidate(str(count), timer, held))
            times = interleave(candidates, self.rounds)
            first, last = times[str(few)], times[str(many)]
            medians = statistics.median(first), statistics.median(last)
            held = candidates[0].cache_bytes, candidates[1].cache_bytes
            rows.append(LongRow(name, few, many, *medians, median_ratio(last, first), *held))
        return rows
