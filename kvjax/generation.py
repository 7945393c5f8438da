"""``generate`` and ``stream_generate``: text in, text out of a compressed cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache.cache import Cache
from kvjax.cache.groups import slot_bytes
from kvjax.cache.host_memory import as_numpy
from kvjax.cache.quantisation import Storage
from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.output import Output, Piece, Stats
from kvjax.planning import full_cache_bytes
from kvjax.policies import Policy
from kvjax.policies.round_attention import RoundAttention
from kvjax.prompts import Prompt
from kvjax.request import Options, Request
from kvjax.rounds.conversation import Conversation
from kvjax.rounds.generating import RoundTurn
from kvjax.runtime.compilation import CompileClock, compile_clock
from kvjax.runtime.decode import CHUNK
from kvjax.runtime.interrupt import Interrupt, interruptible
from kvjax.runtime.session import ChunkResult, Session, spread
from kvjax.text.detokenizer import TextStream, text_of

#: Tokens between two pieces of a stream.
_STREAM_STEPS = 8


def generate(
    lm: LanguageModel,
    prompt: Prompt | Sequence[Prompt],
    *,
    policy: Policy | str | None = None,
    storage: Storage | str | None = None,
    cache: Cache | Conversation | Sequence[Cache] | Sequence[Conversation] | None = None,
    consume_cache: bool = False,
    chat: bool = True,
    context: str | Sequence[int] | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    n: int = 1,
    stop: str | Sequence[str] | None = (),
    stop_token_ids: Sequence[int] | None = None,
    logprobs: bool = False,
    memory_limit: int | None = None,
) -> Any:
    """Generate from one prompt or many, with the cache compressed by a policy.

    Args:
      lm: a model from :func:`kvjax.load`.
      prompt: text, a list of messages ({"role", "content"}; a last message of the assistant's is the beginning of the
        answer), a list of token ids, or a list of such prompts, which run as one batch of rows.
      policy: which tokens the cache keeps: a policy, its text form ("lagkv:ratio=0.25"), or None for all of them.
      storage: what the cache's rows are stored as, whatever the policy: None or "model" (the dtype of the weights),
        "int8", or a :class:`kvjax.Storage`.
      cache: an earlier ``output.cache`` (or one per prompt) to continue; its policy and storage stay. It remains a
        value: the same one may be continued many times.
      consume_cache: donate ``cache`` instead; it cannot be used again.
      chat: apply the model's chat template to text and messages; token ids are always taken as they are.
      context: text that comes before every prompt; it is read and compressed once, before any prompt is seen.
      max_new_tokens: at most this many tokens; 0 only reads the prompt and returns the cache.
      temperature: 0 is greedy. top_k, top_p, min_p restrict what is drawn from.
      repetition_penalty: above 1 makes tokens of the context, prompt and answer less likely (a continued cache does not
        remember which tokens its earlier turns held).
      seed: of the draws, below 2**32; row i of a batch, sample j, draws by (seed, i, j) whatever else is in the batch.
      n: samples of each prompt.
      stop: strings that end the answer; they are not part of the text.
      stop_token_ids: ids that end it, besides the model's own end-of-text ids; () adds none.
      logprobs: also return the log-probability of every token.
      memory_limit: bytes; by default what the device has. A request that does not fit is refused before allocation; an
        answer whose cache would outgrow it ends there, with what there is, by "memory".

    Returns:
      An :class:`Output`; a list of them for a list of prompts; for n > 1 a list of n instead of each.

    Raises:
      UsageError: a request that makes no sense, in one sentence.
      DoesNotFit: too large for the device; the sentence says what would fit.
    """
    options = Options(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        n=n,
        stop=stop,
        stop_token_ids=stop_token_ids,
        logprobs=logprobs,
    )
    return answer(Request(lm, prompt, policy, cache, chat, context, options, memory_limit, storage), consume_cache)


def answer(request: Request, consume_cache: bool = False, between: Callable[[], None] | None = None) -> Any:
    """What :func:`generate` does once the request is checked; ``between`` is called after every chunk of tokens."""
    with compile_clock() as clock, interruptible() as interrupt:
        run = _Run(request, _session(request, clock, interrupt), clock)
        run.prefill(consume_cache)
        for _ in run.chunks(CHUNK):
            if between is not None:
                between()
        return run.outputs()


def stream_generate(lm: LanguageModel, prompt: Prompt, **options: Any) -> Iterator[Piece]:
    """Like :func:`generate` for one prompt, yielding text as it comes; the last piece holds the whole ``output``.

    Takes the keywords of :func:`generate` but ``n``. Text is cut at whole characters, and withheld while it may turn
    out to be the beginning of a stop string. Bad requests are refused at the call, not at the first piece.
    """
    accepted = generate.__kwdefaults__ or {}
    unknown = sorted(set(options) - (set(accepted) - {"n"}))
    if unknown:
        raise UsageError(f"stream_generate takes no {unknown[0]!r}; it takes the keywords of generate but n.")
    o = {**accepted, **options, "n": 1}
    chosen = Options(**{field.name: o[field.name] for field in dataclasses.fields(Options)})
    cached = o["policy"], o["cache"]
    request = Request(lm, prompt, *cached, o["chat"], o["context"], chosen, o["memory_limit"], o["storage"])
    if not request.tokens.single:
        raise UsageError("stream_generate takes one prompt; use generate for a list.")
    return _stream(request, o["consume_cache"])


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
        copies = [i // request.options.n for i in range(request.rows)]
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
            present[row, list(self.request.prompts[row // self.request.options.n])] = True
        return present

    def outputs(self) -> Any:
        """Outputs in the shape of what was passed."""
        cache = self._cache if self._cache is not None else self.session.cache
        policy = self.request.policy
        retained = [as_numpy(policy.retained(layer)) for layer in cache.layers]
        seen = as_numpy(cache.seen)
        n = self.request.options.n
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
            prompt_tokens=len(request.prompts[row // request.options.n]) + len(request.tokens.context),
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
