"""``generate`` and ``stream_generate``: text in, text out of a compressed cache."""

from __future__ import annotations

import codecs
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.value import Cache, concatenate, take
from kvjax.config import ModelConfig
from kvjax.errors import UsageError
from kvjax.model.load import LanguageModel
from kvjax.output import Output, Piece, Stats
from kvjax.plan import check_fits, full_cache_bytes
from kvjax.policies import Full, Policy, parse
from kvjax.prompts import Prompt, Tokens, tokenize
from kvjax.runtime.compilation import CompileClock, compile_clock
from kvjax.runtime.decode import CHUNK, Controls
from kvjax.runtime.interrupt import interruptible
from kvjax.runtime.sampling import Sampling
from kvjax.runtime.session import ChunkResult, Session, spread
from kvjax.runtime.stopping import StopTable, stop_table

#: Tokens between two pieces of a stream.
_STREAM_STEPS = 8


def generate(
    lm: LanguageModel,
    prompt: Prompt | Sequence[Prompt],
    *,
    policy: Policy | str | None = None,
    cache: Cache | Sequence[Cache] | None = None,
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
    stop: str | Sequence[str] = (),
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
      cache: an earlier ``output.cache`` (or one per prompt) to continue; its policy stays. It remains a value: the
        same one may be continued many times.
      consume_cache: donate ``cache`` instead; it cannot be used again.
      chat: apply the model's chat template to text and messages; token ids are always taken as they are.
      context: text that comes before every prompt; it is read and compressed once, before any prompt is seen.
      max_new_tokens: at most this many tokens; 0 only reads the prompt and returns the cache.
      temperature: 0 is greedy. top_k, top_p, min_p restrict what is drawn from.
      repetition_penalty: above 1 makes tokens that are already there less likely.
      seed: of the draws; row i of a batch, sample j, draws by (seed, i, j) whatever else is in the batch.
      n: samples of each prompt.
      stop: strings that end the answer; they are not part of the text.
      stop_token_ids: ids that end it, besides the model's own end-of-text ids; () adds none.
      logprobs: also return the log-probability of every token.
      memory_limit: bytes; by default what the device has. A request that does not fit is refused before allocation.

    Returns:
      An :class:`Output`; a list of them for a list of prompts; for n > 1 a list of n instead of each.

    Raises:
      UsageError: a request that makes no sense, in one sentence.
      DoesNotFit: too large for the device; the sentence says what would fit.
    """
    request = _Request(lm, prompt, policy, cache, chat, context, n, memory_limit)
    controls = _controls(
        lm,
        request.rows,
        n,
        max_new_tokens,
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        seed,
        stop,
        stop_token_ids,
    )
    with compile_clock() as clock, interruptible() as interrupt:
        run = _Run(request, Session(lm.params, controls, clock, interrupt), stop, logprobs, max_new_tokens, clock)
        run.prefill(consume_cache)
        for _ in run.chunks(CHUNK):
            pass
        return run.outputs()


def stream_generate(lm: LanguageModel, prompt: Prompt, **options: Any) -> Iterator[Piece]:
    """Like :func:`generate` for one prompt, yielding text as it comes; the last piece holds the whole ``output``.

    Takes the keywords of :func:`generate` but ``n``. Text is cut at whole characters, and withheld while it may turn
    out to be the beginning of a stop string. Bad requests are refused at the call, not at the first piece.
    """
    accepted = generate.__kwdefaults__ or {}
    unknown = sorted(set(options) - (set(accepted) - {"n"}))
    if unknown:
        raise UsageError(
            f"stream_generate takes no {unknown[0]!r}; it takes {', '.join(k for k in accepted if k != 'n')}."
        )
    o = {**accepted, **options}
    request = _Request(lm, prompt, o["policy"], o["cache"], o["chat"], o["context"], 1, o["memory_limit"])
    if not request.tokens.single:
        raise UsageError("stream_generate takes one prompt; use generate for a list.")
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
    controls = _controls(lm, 1, 1, *(o[name] for name in names), o["stop_token_ids"])
    return _stream(request, controls, o)


def _stream(request: _Request, controls: Controls, o: dict[str, Any]) -> Iterator[Piece]:
    with compile_clock() as clock, interruptible() as interrupt:
        session = Session(request.lm.params, controls, clock, interrupt)
        run = _Run(request, session, o["stop"], o["logprobs"], o["max_new_tokens"], clock)
        run.prefill(o["consume_cache"])
        text = _TextStream(request.lm, run.stops)
        for result in run.chunks(_STREAM_STEPS):
            piece = text.add(result.tokens[0])
            if piece or result.tokens[0]:
                yield Piece(piece, tuple(result.tokens[0]))
        output = run.outputs()
        yield Piece(text.rest(output.text), (), output)


class _Request:
    """Prompts tokenised and checked against the model, the policy and the device, before anything is allocated."""

    def __init__(
        self,
        lm: LanguageModel,
        prompt: Any,
        policy: Policy | str | None,
        cache: Cache | Sequence[Cache] | None,
        chat: bool,
        context: Any,
        n: int,
        memory_limit: int | None,
    ):
        _whole("n", n, 1)
        self.lm, self.n = lm, n
        self.tokens: Tokens = tokenize(lm, prompt, context=context, chat=chat, onto=cache is not None)
        count = len(self.tokens.prompts)
        self.cache = _one_cache(cache, count)
        if self.cache is not None:
            if policy is not None and parse(policy) != self.cache.policy:
                raise UsageError(
                    f"The cache was compressed by {self.cache.policy}; it continues with that policy, so leave "
                    "policy= out or give the same one."
                )
            _same_model(lm.config, self.cache)
        self.policy: Policy = (
            self.cache.policy if self.cache is not None else (Full() if policy is None else parse(policy))
        )
        self.policy.check(lm.config)
        self.rows = count * n
        self.prompts = self._with_pending()
        self.check_lengths(memory_limit)

    def _with_pending(self) -> list[tuple[int, ...]]:
        """Prompts of a continued cache begin with the token that was generated but not yet read."""
        if self.cache is None:
            return list(self.tokens.prompts)
        result = []
        for pending, ids in zip(np.asarray(self.cache.pending).tolist(), self.tokens.prompts, strict=True):
            # The end of the last answer comes with the new turn's own text.
            ended = pending < 0 or pending in self.lm.stop_token_ids
            result.append(ids if ended else (pending, *ids))
        return result

    def check_lengths(self, memory_limit: int | None) -> None:
        config, limit = self.lm.config, self.lm.config.max_position
        seen = np.zeros(len(self.prompts), int) if self.cache is None else np.asarray(self.cache.seen)
        added = np.array([len(self.tokens.context) + len(ids) for ids in self.prompts])
        longest = int((seen + added).max())
        if longest > limit and not (self.policy.beyond_context and int(added.max()) <= limit):
            before = f" after {int(seen.max())} of the conversation" if seen.any() else ""
            raise UsageError(
                f"The prompt has {int(added.max())} tokens{before}; this model's context is {limit}, so shorten it."
            )
        dtype = _dtype(self.lm)
        check_fits(config, longest, self.rows, self.policy, dtype, memory_limit, self.lm.params, self.cache)


def _dtype(lm: LanguageModel) -> Any:
    return jnp.dtype(lm.params.embedding[...].dtype)


def _one_cache(cache: Cache | Sequence[Cache] | None, count: int) -> Cache | None:
    """The caches to continue as one batch with a row per prompt."""
    if cache is None:
        return None
    if not isinstance(cache, Cache):
        cache = concatenate(list(cache))
    leaf = cache.layers[0].k
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise UsageError("This cache was consumed by an earlier call; keep a cache by leaving consume_cache=False.")
    if cache.batch == 1 and count > 1:
        return take(cache, [0] * count)
    if cache.batch != count:
        raise UsageError(f"The cache has {cache.batch} rows and there are {count} prompts; give one prompt a row.")
    return cache


def _same_model(config: ModelConfig, cache: Cache) -> None:
    first = cache.layers[0]
    shape = (len(cache.layers), len(first.pages), first.k.shape[2])
    wanted = (config.num_layers, config.num_kv_heads, config.head_dim)
    if shape != wanted:
        raise UsageError(
            f"The cache is of another model: it has {shape[0]} layers of {shape[1]} heads of {shape[2]} channels, "
            f"and this model has {wanted[0]} of {wanted[1]} of {wanted[2]}."
        )


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise UsageError(f"{name} is {value!r}; give a whole number of at least {least}.")


def _number(name: str, value: Any, least: float, most: float, open_below: bool = False) -> None:
    bad = isinstance(value, bool) or not isinstance(value, (int, float, np.floating)) or not math.isfinite(value)
    if bad or value < least or value > most or (open_below and value == least):
        upper = f" and at most {most:g}" if math.isfinite(most) else ""
        raise UsageError(
            f"{name} is {value!r}; give a number {'above' if open_below else 'of at least'} {least:g}{upper}."
        )


def _controls(
    lm: LanguageModel,
    rows: int,
    n: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    seed: int,
    stop: str | Sequence[str],
    stop_token_ids: Sequence[int] | None,
) -> Controls:
    """Check a request's parameters and bring them to the device."""
    _whole("max_new_tokens", max_new_tokens, 0)
    _number("temperature", temperature, 0, math.inf)
    _number("top_p", top_p, 0, 1, open_below=True)
    _number("min_p", min_p, 0, 1)
    _number("repetition_penalty", repetition_penalty, 0, math.inf, open_below=True)
    if top_k is not None:
        _whole("top_k", top_k, 1)
    _whole("seed", seed, 0)
    ids = [*lm.stop_token_ids, *(stop_token_ids or ())]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < lm.config.vocab_size:
            raise UsageError(f"The stop token id {token!r} is not one of this model's 0 to {lm.config.vocab_size - 1}.")
    vocabulary = lm.config.vocab_size
    sampling = Sampling(
        temperature=np.float32(temperature),
        top_k=np.int32(min(top_k or vocabulary, vocabulary)),
        top_p=np.float32(top_p),
        min_p=np.float32(min_p),
        repetition_penalty=np.float32(repetition_penalty),
        keys=_keys(np.uint32(seed & 0xFFFFFFFF), np.arange(rows) // n, np.arange(rows) % n),
    )
    stops = _stop_table(lm, _stop_strings(stop), tuple(int(token) for token in ids))
    return Controls(sampling, stops, np.int32(min(max_new_tokens, 2**31 - 1)), np.int32(lm.config.max_position))


@jax.jit
def _keys(seed: jax.Array, row: jax.Array, sample: jax.Array) -> jax.Array:
    """One random key per (seed, row, sample)."""
    key = jax.random.key(seed)
    return jax.vmap(lambda i, j: jax.random.fold_in(jax.random.fold_in(key, i), j))(row, sample)


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if any(not isinstance(s, str) or not s for s in strings):
        raise UsageError("A stop string is empty or not text; give strings of at least one character.")
    return strings


def _stop_table(lm: LanguageModel, strings: tuple[str, ...], ids: tuple[int, ...]) -> StopTable:
    if not strings:
        return _plain_table(ids, lm.config.vocab_size)
    return stop_table(strings, ids, lm.tokenizer.token_bytes(), lm.config.vocab_size)


@functools.lru_cache(maxsize=8)
def _plain_table(ids: tuple[int, ...], vocabulary: int) -> StopTable:
    return stop_table((), ids, (), vocabulary)


class _Run:
    """One call of generate: rows, their tokens so far, and in the end their outputs."""

    def __init__(
        self, request: _Request, session: Session, stop: Any, logprobs: bool, max_new_tokens: int, clock: CompileClock
    ):
        self.request, self.session, self.clock = request, session, clock
        self.stops, self.max_new_tokens = _stop_strings(stop), max_new_tokens
        self.tokens: list[list[int]] = [[] for _ in range(request.rows)]
        self.logprobs: list[list[float]] | None = [[] for _ in range(request.rows)] if logprobs else None
        self.reasons: list[str | None] = [None] * request.rows
        self._cache: Cache | None = None
        self._logits: jax.Array | None = None

    def prefill(self, consume: bool) -> None:
        """Read the context once, then the prompts, then give every sample its row."""
        request, session = self.request, self.session
        options: dict[str, Any] = {"policy": request.policy, "dtype": _dtype(request.lm)}
        cache, prompts = request.cache, request.prompts
        if request.tokens.context:
            cache, _ = session.prefill([request.tokens.context], cache=None, consume=False, **options)
            cache, _ = spread(cache, None, [0] * len(prompts))
            consume = True
        if any(not ids for ids in prompts):
            raise UsageError("A prompt has no tokens; give at least one character.")
        cache, logits = session.prefill(prompts, cache=cache, consume=consume, **options)
        copies = [i // request.n for i in range(request.rows)]
        self._cache, self._logits = spread(cache, logits, copies)

    def chunks(self, steps: int) -> Iterator[ChunkResult]:
        """The first token, then ``steps`` at a time."""
        if self.max_new_tokens == 0:
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
        lengths = [np.asarray(layer.length) for layer in cache.layers]
        seen = np.asarray(cache.seen)
        n = self.request.n
        rows = [self._output(row, cache, lengths, seen) for row in range(self.request.rows)]
        grouped = [rows[i] if n == 1 else rows[i * n : (i + 1) * n] for i in range(len(rows) // n)]
        return grouped[0] if self.request.tokens.single else grouped

    def _output(self, row: int, cache: Cache, lengths: list[np.ndarray], seen: np.ndarray) -> Output:
        request, lm = self.request, self.request.lm
        tokens = tuple(self.tokens[row])
        text = _cut(lm.tokenizer.decode(tokens), self.stops)
        logprobs = None if self.logprobs is None else tuple(self.logprobs[row])
        return Output(
            text=text,
            tokens=tokens,
            finish_reason=self.reasons[row] or "interrupted",
            logprobs=logprobs,
            stats=self._stats(row, cache, lengths, int(seen[row])),
            _cache=functools.partial(cache.row, row),
        )

    def _stats(self, row: int, cache: Cache, lengths: list[np.ndarray], seen: int) -> Stats:
        request, times = self.request, self.session.times
        read = sum(len(ids) for ids in request.prompts) + len(request.tokens.context)
        decoded = sum(max(len(tokens) - 1, 0) for tokens in self.tokens)
        retained = tuple(tuple(int(x) for x in layer[row]) for layer in lengths)
        slot = 2 * request.lm.config.head_dim * cache.layers[0].k.dtype.itemsize
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
            live_cache_bytes=slot * sum(sum(heads) for heads in retained),
            full_cache_bytes=full_cache_bytes(request.lm.config, seen, _dtype(request.lm)),
            retained=retained,
            seen=seen,
        )


def _cut(text: str, stops: tuple[str, ...]) -> str:
    """Text up to the first stop string."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else text


class _TextStream:
    """Turns tokens into text that never has to be taken back: whole characters, no half stop strings."""

    def __init__(self, lm: LanguageModel, stops: tuple[str, ...]):
        self._bytes = lm.tokenizer.token_bytes()
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._given, self._held = 0, ""
        self._text = ""

    def add(self, tokens: Sequence[int]) -> str:
        """Text that these tokens make certain."""
        new = b"".join(self._bytes[token] for token in tokens if token < len(self._bytes))
        self._text = _cut(self._text + self._decoder.decode(new), self._stops)
        certain = len(self._text) - self._doubtful()
        piece = self._text[self._given : certain]
        self._given = max(self._given, certain)
        return piece

    def _doubtful(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def rest(self, text: str) -> str:
        """What the whole text has beyond the pieces given."""
        return text[self._given :]
