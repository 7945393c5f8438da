"""The measurements: every contender of a case is timed in turn, round after round, and medians are reported.

Interleaving matters more than repetition: on a shared machine the speed drifts by tens of percent within a minute,
and only times taken side by side can be divided by each other.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax.bench import machine
from kvjax.config import ModelConfig
from kvjax.errors import UsageError
from kvjax.model.decoder import Decoder

if TYPE_CHECKING:
    from kvjax.bench.transformers_peer import TransformersPeer
    from kvjax.cache import Cache
    from kvjax.model.load import LanguageModel

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    """One contender at one batch and context; seconds are of one step, which makes ``batch`` tokens.

    ``limit_share`` is (bytes a step must read / measured bandwidth) / seconds: 1 is the memory's own speed. It is set
    by :func:`with_limit` when the run's best bandwidth is known.
    """

    batch: int
    context: int
    contender: str
    step_seconds: float
    rounds: tuple[float, ...]
    tokens_per_second: float
    cache_bytes: int
    live_cache_bytes: int
    step_bytes: int
    peak_bytes: int
    limit_share: float | None = None
    speedup_over_peer: float | None = None


@dataclasses.dataclass(frozen=True)
class PrefillRow:
    """One contender at one prompt length, batch 1; seconds from token ids to the compressed cache and next token."""

    prompt_tokens: int
    contender: str
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


def weight_bytes_per_step(params: Decoder, config: ModelConfig) -> int:
    """Bytes of weights a decode step must read: all of them, but of an untied embedding table only a few rows."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return total if config.tie_embeddings else total - params.embedding[...].nbytes


def with_limit(rows: Sequence[DecodeRow], bandwidth: machine.Bandwidth) -> list[DecodeRow]:
    """The rows with their share of what the memory could deliver."""
    rate = bandwidth.bytes_per_second
    return [dataclasses.replace(row, limit_share=row.step_bytes / rate / row.step_seconds) for row in rows]


def interleave(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, tuple[float, ...]]:
    """Call every contender once a round, in turn; each returns its own seconds."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, measure in contenders.items():
            times[name].append(measure())
    return {name: tuple(values) for name, values in times.items()}


def check_request(config: ModelConfig, *, rounds: int, steps: int, **sizes: Sequence[int]) -> None:
    """Refuse what cannot be measured, before anything is."""
    for name, value in {"rounds": rounds, "steps": steps}.items():
        if value < 1:
            raise UsageError(f"{name} is {value}; give at least 1.")
    for name, values in sizes.items():
        for value in values:
            if value < 1:
                raise UsageError(f"{name} holds {value}; give at least 1.")
            if name in ("context", "prefill") and value + steps > config.max_position:
                raise UsageError(
                    f"{name} {value} with {steps} steps is beyond the model's context of {config.max_position} tokens."
                )


class Bench:
    """A loaded model, its policies and an optional peer, measured case by case."""

    def __init__(
        self,
        lm: LanguageModel,
        policies: Mapping[str, Any],
        *,
        rounds: int,
        steps: int,
        peer: TransformersPeer | None = None,
        progress: Progress = lambda _: None,
    ):
        self.lm, self.policies, self.rounds, self.steps = lm, policies, rounds, steps
        self.peer, self.progress = peer, progress
        self.dtype = lm.params.embedding[...].dtype
        self.bandwidth = machine.measure_bandwidth()

    def refresh_bandwidth(self) -> None:
        """Measure again and keep the better reading."""
        self.bandwidth = machine.faster(self.bandwidth, machine.measure_bandwidth())

    def _filled(self, policy: Any, batch: int, context: int) -> Cache:
        from kvjax.runtime.synthetic import filled_cache

        return filled_cache(self.lm.config, policy, batch, context, self.dtype)

    def _step_seconds(self, policy: Any, cache: Cache) -> float:
        from kvjax.runtime.decode import time_steps

        return time_steps(self.lm.params, self.lm.config, policy, cache, self.steps)

    def decode(self, batch: int, context: int) -> list[DecodeRow]:
        """Every policy, and the peer, decoding from a cache filled with ``context`` tokens a row."""
        contenders: dict[str, Callable[[], float]] = {}
        sizes: dict[str, tuple[int, int, int]] = {}  # allocated, live, peak bytes
        for name, policy in self.policies.items():
            self.progress(f"decode: batch {batch}, context {context}, {name}")
            with machine.watch_peak() as memory:
                cache = self._filled(policy, batch, context)
                self._step_seconds(policy, cache)  # compiles
            contenders[name] = lambda policy=policy, cache=cache: self._step_seconds(policy, cache)
            sizes[name] = (cache.nbytes, cache.live_nbytes, memory.added)
        if (peer := self.peer) is not None:
            self.progress(f"decode: batch {batch}, context {context}, {peer.name}")
            with machine.watch_peak() as memory:
                theirs = peer.filled_cache(batch, context)
                held = peer.nbytes(theirs)
                peer.decode_seconds(theirs, batch, context, self.steps)
            contenders[peer.name] = lambda: peer.decode_seconds(theirs, batch, context, self.steps)
            sizes[peer.name] = (held, held, memory.added)
        times = interleave(contenders, self.rounds)
        return [self._decode_row(batch, context, name, times, *sizes[name]) for name in contenders]

    def _decode_row(
        self,
        batch: int,
        context: int,
        name: str,
        times: dict[str, tuple[float, ...]],
        allocated: int,
        live: int,
        peak: int,
    ) -> DecodeRow:
        seconds = statistics.median(times[name])
        step_bytes = weight_bytes_per_step(self.lm.params, self.lm.config) + live
        return DecodeRow(
            batch=batch,
            context=context,
            contender=name,
            step_seconds=seconds,
            rounds=times[name],
            tokens_per_second=batch / seconds,
            cache_bytes=allocated,
            live_cache_bytes=live,
            step_bytes=step_bytes,
            peak_bytes=peak,
            speedup_over_peer=self._over_peer(name, times),
        )

    def _over_peer(self, name: str, times: dict[str, tuple[float, ...]]) -> float | None:
        """Median of the rounds' own ratios: what drifts between rounds cancels."""
        if self.peer is None or name == self.peer.name:
            return None
        return statistics.median(theirs / ours for theirs, ours in zip(times[self.peer.name], times[name], strict=True))

    def prefill(self, prompt_tokens: int) -> list[PrefillRow]:
        """Every policy, and the peer, reading one prompt of random token ids."""
        ids = np.random.default_rng(0).integers(0, self.lm.config.vocab_size, prompt_tokens).tolist()
        contenders: dict[str, Callable[[], float]] = {
            name: lambda policy=policy: self._prefill_seconds(ids, policy) for name, policy in self.policies.items()
        }
        if (peer := self.peer) is not None:
            contenders[peer.name] = lambda: peer.prefill_seconds(np.asarray([ids]))
        peaks = {}
        for name, measure in contenders.items():
            self.progress(f"prefill: {prompt_tokens} tokens, {name}")
            measure()  # compiles
            with machine.watch_peak() as memory:
                measure()
            peaks[name] = memory.added
        times = interleave(contenders, self.rounds)
        rows = []
        for name, seconds in times.items():
            median = statistics.median(seconds)
            over = self._over_peer(name, times)
            rows.append(PrefillRow(prompt_tokens, name, median, seconds, prompt_tokens / median, peaks[name], over))
        return rows

    def _prefill_seconds(self, ids: list[int], policy: Any) -> float:
        import kvjax

        start = time.perf_counter()
        kvjax.generate(self.lm, ids, policy=policy, max_new_tokens=0)
        return time.perf_counter() - start

    def long(self, many: int, few: int = 100) -> list[LongRow]:
        """The step after ``few`` and after ``many`` really generated tokens, for every policy, batch 1."""
        import kvjax

        rows = []
        prompt = np.random.default_rng(0).integers(0, self.lm.config.vocab_size, 256).tolist()
        for name, policy in self.policies.items():
            caches = {}
            for count in (few, many):
                self.progress(f"generating {count} tokens, {name}")
                output = kvjax.generate(
                    self.lm, prompt, policy=policy, max_new_tokens=count, stop_token_ids=(), temperature=1.0
                )
                caches[count] = output.cache
                self._step_seconds(policy, output.cache)  # compiles
            times = interleave(
                {
                    str(count): lambda policy=policy, cache=cache: self._step_seconds(policy, cache)
                    for count, cache in caches.items()
                },
                self.rounds,
            )
            first, last = (statistics.median(times[str(count)]) for count in (few, many))
            ratio = statistics.median(b / a for a, b in zip(times[str(few)], times[str(many)], strict=True))
            rows.append(LongRow(name, few, many, first, last, ratio, caches[few].nbytes, caches[many].nbytes))
        return rows
