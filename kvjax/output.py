"""The results of a generation: text, tokens, the compressed cache, and what it cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax.cache.cache import Cache
    from kvjax.rounds.conversation import Conversation
    from kvjax.rounds.stats import RoundStats


@dataclasses.dataclass(frozen=True)
class Stats:
    """Measured cost of one call; times in seconds, sizes in bytes. Times are the whole batch's.

    Attributes:
      prompt_tokens: tokens this row's prompt added, context included.
      generated_tokens: tokens this row generated.
      prompt_seconds: prefill of the prompts, without compilation.
      decode_seconds: generation after the first token, without compilation.
      compile_seconds: tracing and compilation during this call; 0 when all programs were compiled before.
      time_to_first_token: from the call to the first token, without compilation.
      prompt_tokens_per_second: prompt tokens of all rows over ``prompt_seconds``.
      decode_tokens_per_second: generated tokens of all rows, except the first of each, over ``decode_seconds``.
      cache_bytes: allocated for this row's cache, counters included, and an equal part of a context that rows share.
      device_cache_bytes: allocated on each device for the whole batch, including a mesh's rows of padding.
      device_peak_bytes: the most that arrays held on each device between two programs of the call, for the whole
        batch: the cache, the one it continues, and copies. Arrays from before the call are not counted, except the
        continued cache, nor are temporaries within a program.
      live_cache_bytes: of ``cache_bytes``, slots that hold a token.
      shared_cache_bytes: of ``device_cache_bytes``, the context that all rows share; 0 where each holds a copy of it.
      full_cache_bytes: bytes that keeping every token seen would take; of a layer with a window, every one in it.
      clipped: int8 keys beyond the scale fixed at the first prompt, which were clipped, over all layers and heads.
      retained: tokens kept, [layer][KV head].
      seen: tokens that the row has processed so far.
      repeated_tokens: under a policy that has the model repeat the prompt (KVzip), tokens read for that alone,
        including its request; their time is part of ``prompt_seconds``.
      windows: of each layer its sliding window in tokens, which are all that it keeps, or None of a global layer; empty
        where all layers are global.
      rounds: under RoundAttention, what the turn selected. The cache's bytes above are then those while it answered,
        with all rounds below the watershed and the selected ones above it; before and after that, while the question
        is read and its round is closed, the device holds more: ``device_peak_bytes``.
      choice: where the policy was asked for as ``best``, the one that it became and why, in one line.
    """

    prompt_tokens: int
    generated_tokens: int
    prompt_seconds: float
    decode_seconds: float
    compile_seconds: float
    time_to_first_token: float
    prompt_tokens_per_second: float
    decode_tokens_per_second: float
    cache_bytes: int
    device_cache_bytes: int
    device_peak_bytes: int
    live_cache_bytes: int
    full_cache_bytes: int
    clipped: int
    retained: tuple[tuple[int, ...], ...]
    seen: int
    shared_cache_bytes: int = 0
    repeated_tokens: int = 0
    windows: tuple[int | None, ...] = ()
    rounds: RoundStats | None = None
    choice: str | None = None


@dataclasses.dataclass(frozen=True)
class Output:
    """One generated answer.

    Attributes:
      text: what was generated, without special tokens and without the stop string that ended it.
      tokens: every generated id, the one that ended the text included.
      finish_reason: "stop" (end-of-text id, stop id or stop string), "length" (max_new_tokens), "context" (the model's
        context is full), "memory" (the cache would have to grow beyond the memory limit), "interrupted", or
        "cancelled" (:meth:`kvjax.Handle.cancel`).
      logprobs: natural log of the model's probability of each token, when asked for.
      prompt_logprobs: the same of each of the ``stats.prompt_tokens`` tokens that this call read, when asked for; None
        for the first, before which it read nothing.
      stats: what it cost.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[float, ...] | None
    stats: Stats
    _cache: Callable[[], Any] = dataclasses.field(repr=False, compare=False)
    prompt_logprobs: tuple[float | None, ...] | None = None

    @property
    def cache(self) -> Cache | Conversation:
        """This row's cache, batch 1: a :class:`kvjax.Cache`, under RoundAttention a :class:`kvjax.Conversation`.

        Continue from it with ``generate(lm, prompt, cache=output.cache)``. A :class:`kvjax.Chat` consumes it in its
        next turn unless it was read here before.

        Raises:
          UsageError: the chat that gave this output has gone on and consumed it.
        """
        return self._cache()


@dataclasses.dataclass(frozen=True)
class Score:
    """The log-probabilities that a model gives to one continuation.

    Attributes:
      tokens: its ids.
      logprobs: natural log of the model's probability of each, after all that comes before it.
      best_tokens: the model's most likely id in each place; greedy decoding would take it there.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    best_tokens: tuple[int, ...]

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding gives this continuation: each token is the most likely in its place."""
        return self.tokens == self.best_tokens

    @property
    def total(self) -> float:
        """The log-probability of the whole continuation."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-probability of a token."""
        return math.exp(min(-self.total / len(self.logprobs), 700.0))


@dataclasses.dataclass(frozen=True)
class Piece:
    """A step of a streamed answer: its new text and tokens, and at the end the whole ``output``."""

    text: str
    tokens: tuple[int, ...]
    output: Output | None = None
