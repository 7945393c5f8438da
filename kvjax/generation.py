"""``generate`` and ``stream_generate``: text in, text out of a compressed cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Unpack, overload

import jax
import numpy as np

from kvjax.cache.cache import Cache
from kvjax.cache.groups import slot_bytes
from kvjax.cache.host_memory import as_numpy
from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.options import GenerationKeywords, GenerationOptions, merged, shows_options
from kvjax.output import Output, Piece, Stats
from kvjax.planning import full_cache_bytes
from kvjax.policies.round_attention import RoundAttention
from kvjax.prompts import Prompt, Prompts
from kvjax.request import Request
from kvjax.rounds.conversation import Conversation
from kvjax.rounds.generating import RoundTurn
from kvjax.runtime.compilation import CompileClock, compile_clock
from kvjax.runtime.decode import CHUNK
from kvjax.runtime.interrupt import Interrupt, interruptible
from kvjax.runtime.session import ChunkResult, Session, spread
from kvjax.text.detokenizer import TextStream, text_of

#: Tokens between two pieces of a stream.
_STREAM_STEPS = 8
#: Keywords that belong to one call and are no options.
_CALL = ("cache", "consume_cache", "context")


#: ``n`` written out: a type checker then knows that there are several samples.
_Several = Literal[2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 20, 24, 32, 48, 64]
_Options = GenerationOptions | None


class _Keywords(GenerationKeywords, total=False):
    """Every keyword of :func:`generate` but ``n``, for type checkers."""

    cache: Cache | Conversation | Sequence[Cache] | Sequence[Conversation] | None
    consume_cache: bool
    context: str | Sequence[int] | None


@overload
def generate(
    lm: LanguageModel, prompt: Prompt, options: _Options = None, *, n: Literal[1] = 1, **keywords: Unpack[_Keywords]
) -> Output: ...
@overload
def generate(
    lm: LanguageModel, prompt: Prompt, options: _Options = None, *, n: _Several, **keywords: Unpack[_Keywords]
) -> list[Output]: ...
@overload
def generate(
    lm: LanguageModel, prompt: Prompt, options: _Options = None, *, n: int, **keywords: Unpack[_Keywords]
) -> Output | list[Output]: ...
@overload
def generate(
    lm: LanguageModel, prompt: Prompts, options: _Options = None, *, n: Literal[1] = 1, **keywords: Unpack[_Keywords]
) -> list[Output]: ...
@overload
def generate(
    lm: LanguageModel, prompt: Prompts, options: _Options = None, *, n: _Several, **keywords: Unpack[_Keywords]
) -> list[list[Output]]: ...
@overload
def generate(
    lm: LanguageModel, prompt: Prompts, options: _Options = None, *, n: int, **keywords: Unpack[_Keywords]
) -> list[Output] | list[list[Output]]: ...


@shows_options()
def generate(
    lm: LanguageModel,
    prompt: Prompt | Prompts,
    options: GenerationOptions | None = None,
    *,
    n: int = 1,
    cache: Cache | Conversation | Sequence[Cache] | Sequence[Conversation] | None = None,
    consume_cache: bool = False,
    context: str | Sequence[int] | None = None,
    **keywords: Unpack[GenerationKeywords],
) -> Any:
    """Generate from one prompt or many, with the cache compressed by a policy.

    Args:
      lm: a model from :func:`kvjax.load`.
      prompt: text, a list of messages ({"role", "content"}; a last message of the assistant's is the beginning of the
        answer), a list of token ids, or a list of such prompts, which run as one batch.
      options: how to answer, for all prompts.
      n: samples of each prompt. A type checker knows what returns where it is written out as a number.
      cache: an earlier ``output.cache`` (or one per prompt) to continue; its policy and storage stay. It remains a
        value: the same one may be continued many times.
      consume_cache: donate ``cache`` instead; it cannot be used again.
      context: text that comes before every prompt; it is read and compressed once, before any prompt is seen.
      keywords: fields of :class:`kvjax.GenerationOptions`, in place of those of ``options``:

    Returns:
      An :class:`Output`; a list of them for a list of prompts; for n > 1 a list of n instead of each.

    Raises:
      UsageError: a request that makes no sense, in one sentence.
      DoesNotFit: too large for the device; the sentence says what would fit.
    """
    chosen = merged("generate", options, keywords, also=("n", *_CALL))
    return answer(Request(lm, prompt, chosen, n=n, cache=cache, context=context), consume_cache)


def answer(request: Request, consume_cache: bool = False, between: Callable[[], None] | None = None) -> Any:
    """Run a checked request and return its outputs; ``between`` is called after every chunk of tokens."""
    with compile_clock() as clock, interruptible() as interrupt:
        run = _Run(request, _session(request, clock, interrupt), clock)
        run.prefill(consume_cache)
        for _ in run.chunks(CHUNK):
            if between is not None:
                between()
        return run.outputs()


@shows_options()
def stream_generate(
    lm: LanguageModel,
    prompt: Prompt,
    options: GenerationOptions | None = None,
    *,
    cache: Cache | Conversation | None = None,
    consume_cache: bool = False,
    context: str | Sequence[int] | None = None,
    **keywords: Unpack[GenerationKeywords],
) -> Iterator[Piece]:
    """Like :func:`generate` for one prompt, yielding text as it comes; the last piece holds the whole ``output``.

    Text is cut at whole characters, and withheld while it may turn out to be the beginning of a stop string. Bad
    requests are refused at the call, not at the first piece.

    Args:
      lm, prompt, options, cache, consume_cache, context: as for :func:`generate`.
      keywords: fields of :class:`kvjax.GenerationOptions`, in place of those of ``options``:
    """
    chosen = merged("stream_generate", options, keywords, also=_CALL)
    request = Request(lm, prompt, chosen, cache=cache, context=context)
    if not request.tokens.single:
        raise UsageError("stream_generate takes one prompt; use generate for a list.")
    return _stream(request, consume_cache)


def _stream(request: Request, consume: bool) -> Iterator[Piece]:
    with compile_clock() as clock, interruptible() as interrupt:
        run = _Run(request, _session(request, clock, interrupt), clock)
        run.prefill(consume)
        text = TextStream(request.lm.tokenizer, request.options.stop_strings)
        for result in run.chunks(_STREAM_STEPS):
            piece = text.add(result.tokens[0])
            if piece or result.tokens[0]:
                yield Piece(piece, tuple(result.tokens[0]))
        output = run.outputs()
        yield Piece(text.rest(), (), output)


def _session(request: Request, clock: CompileClock, interrupt: Interrupt) -> Session:
    return Session(request.lm.params, request.controls(), clock, interrupt, request.programs, request.may_grow)


class _Run:
    """One call of generate: rows, their tokens so far, and in the end their outputs."""

    def __init__(self, request: Request, session: Session, clock: CompileClock):
        self.request, self.session, self.clock = request, session, clock
        self.tokens: list[list[int]] = [[] for _ in range(request.rows)]
        self.logprobs: list[list[float]] | None = (
            [[] for _ in range(request.rows)] if request.options.logprobs else None
        )
        self.reasons: list[str | None] = [None] * request.rows
        self._cache: Cache | None = None
        self._logits: jax.Array | None = None
        self._rounds = RoundTurn(request, session) if isinstance(request.policy, RoundAttention) else None

    def prefill(self, consume: bool) -> None:
        """Read the context once, then the prompts, then give every sample its row."""
        if self._rounds is not None:
            self._cache, self._logits = self._rounds.prefill(consume)
            return
        request, session = self.request, self.session
        options: dict[str, Any] = {"policy": request.policy, "dtype": request.dtype, "storage": request.storage}
        cache, prompts = request.cache, request.prompts
        if request.tokens.context:
            cache, _ = session.prefill([request.tokens.context], cache=None, consume=False, **options)
            cache, _ = spread(cache, None, [0] * request.programs.rows(len(prompts)))
            consume = True
        cache, logits = session.prefill(prompts, cache=cache, consume=consume, **options)
        copies = [i // request.n for i in range(request.rows)]
        copies += [0] * (request.programs.rows(request.rows) - request.rows)
        self._cache, self._logits = spread(cache, logits, copies)

    def chunks(self, steps: int) -> Iterator[ChunkResult]:
        """The first token, then ``steps`` at a time."""
        if self.request.options.max_new_tokens == 0:
            self.reasons = ["length"] * self.request.rows
            return
        assert self._cache is not None and self._logits is not None
        cache, self._cache = self._cache, None
        result = self.session.start(cache, self._logits, self._present(), self.logprobs is not None)
        self._take(result)
        yield result
        for result in self.session.chunks(steps):
            self._take(result)
            yield result
        self._cache = self.session.cache

    def _take(self, result: ChunkResult) -> None:
        for row, tokens in enumerate(result.tokens):
            self.tokens[row].extend(tokens)
            if self.logprobs is not None and result.logprobs is not None:
                self.logprobs[row].extend(result.logprobs[row])
        self.reasons = result.reasons

    def _present(self) -> np.ndarray:
        """Which tokens each row's prompt holds, for the repetition penalty."""
        present = np.zeros((self.request.rows, self.request.lm.config.vocab_size), bool)
        for row in range(self.request.rows):
            present[row, list(self.request.tokens.context)] = True
            present[row, list(self.request.prompts[row // self.request.n])] = True
        return present

    def outputs(self) -> Any:
        """Outputs in the shape of what was passed."""
        cache = self._cache if self._cache is not None else self.session.cache
        policy = self.request.policy
        retained = [as_numpy(policy.retained(layer)) for layer in cache.layers]
        seen = as_numpy(cache.seen)
        n = self.request.n
        kept = cache if self._rounds is None else self._rounds.finish(cache, self.tokens)
        counters = retained, seen, cache.clipped
        rows = [self._output(row, cache, kept, counters) for row in range(self.request.rows)]
        grouped = [rows[i] if n == 1 else rows[i * n : (i + 1) * n] for i in range(len(rows) // n)]
        return grouped[0] if self.request.tokens.single else grouped

    def _output(
        self,
        row: int,
        cache: Cache,
        kept: Cache | Conversation,
        counters: tuple[list[np.ndarray], np.ndarray, np.ndarray],
    ) -> Output:
        request, lm = self.request, self.request.lm
        tokens = tuple(self.tokens[row])
        text = text_of(lm.tokenizer, tokens, request.options.stop_strings)
        logprobs = None if self.logprobs is None else tuple(self.logprobs[row])
        return Output(
            text=text,
            tokens=tokens,
            finish_reason=self.reasons[row] or self.session.cut,
            logprobs=logprobs,
            stats=self._stats(row, cache, *counters),
            _cache=functools.partial(kept.row, row),
        )

    def _stats(self, row: int, cache: Cache, kept: list[np.ndarray], seen: np.ndarray, clipped: np.ndarray) -> Stats:
        request, times = self.request, self.session.times
        read = sum(len(ids) for ids in request.prompts) + len(request.tokens.context)
        decoded = sum(max(len(tokens) - 1, 0) for tokens in self.tokens)
        retained = tuple(tuple(int(x) for x in layer[row]) for layer in kept)
        sizes = [slot_bytes(layer) for layer in cache.layers]
        return Stats(
            prompt_tokens=len(request.prompts[row // request.n]) + len(request.tokens.context),
            generated_tokens=len(self.tokens[row]),
            prompt_seconds=times.prompt,
            decode_seconds=times.decode,
            compile_seconds=self.clock.seconds,
            time_to_first_token=times.first,
            prompt_tokens_per_second=read / times.prompt if times.prompt > 0 else 0.0,
            decode_tokens_per_second=decoded / times.decode if times.decode > 0 else 0.0,
            cache_bytes=cache.nbytes // cache.batch,
            device_cache_bytes=cache.device_nbytes,
            live_cache_bytes=sum(int(np.dot(size, heads)) for size, heads in zip(sizes, retained, strict=True)),
            full_cache_bytes=full_cache_bytes(request.lm.config, int(seen[row]), request.dtype),
            clipped=int(clipped[row]),
            retained=retained,
            seen=int(seen[row]),
            rounds=None if self._rounds is None else self._rounds.stats(row),
        )
