"""``generate`` and ``stream_generate``: text in, text out of a compressed cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvjax.cache.cache import Cache
from kvjax.cache.quantisation import Storage
from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.output import Piece
from kvjax.policies import Policy
from kvjax.prompts import Prompt
from kvjax.request import Options, Request
from kvjax.rounds.conversation import Conversation
from kvjax.runtime.compilation import compile_clock
from kvjax.runtime.decode import CHUNK
from kvjax.runtime.interrupt import interruptible
from kvjax.session import Session
from kvjax.text.detokenizer import TextStream

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
    """Run a request that was checked, as :func:`generate` does; ``between`` is called after every chunk of tokens."""
    with compile_clock() as clock, interruptible() as interrupt, Session(request, clock, interrupt) as session:
        session.prefill(consume_cache)
        for _ in session.chunks(CHUNK):
            if between is not None:
                between()
        return session.outputs()


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
    with compile_clock() as clock, interruptible() as interrupt, Session(request, clock, interrupt) as session:
        session.prefill(consume)
        text = TextStream(request.lm.tokenizer, request.options.stop_strings)
        for result in session.chunks(_STREAM_STEPS):
            piece = text.add(result.tokens[0])
            if piece or result.tokens[0]:
                yield Piece(piece, tuple(result.tokens[0]))
        output = session.outputs()
    yield Piece(text.rest(), (), output)
