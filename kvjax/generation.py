"""``generate`` and ``stream_generate``: text in, text out of a compressed cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Unpack, overload

from kvjax import progress
from kvjax.cache.cache import Cache
from kvjax.cache.continuation import delete, is_row
from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import true_or_false
from kvjax.engine.core import spans_processes
from kvjax.engine.many import answer_many
from kvjax.errors import DoesNotFit, UsageError
from kvjax.interrupt import interruptible
from kvjax.options import GenerationKeywords, GenerationOptions, merged, shows_options
from kvjax.output import Output, Piece
from kvjax.policies import parse
from kvjax.policies.composition import shares
from kvjax.prompts import Prompt, Prompts, as_list
from kvjax.request import Request
from kvjax.rounds.conversation import Conversation
from kvjax.runtime.compilation import compile_clock
from kvjax.runtime.decode import CHUNK
from kvjax.session import Session, running
from kvjax.text.detokenizer import TextStream

#: Tokens between two pieces of a stream.
_STREAM_STEPS = 8
#: Keywords that belong to one call and are no options.
_CALL = ("cache", "consume_cache", "context")


#: ``n`` written out: a type checker then knows that there are several samples.
_Several = Literal[2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 20, 24, 32, 48, 64]
_Options = GenerationOptions | None


class _Keywords(GenerationKeywords, total=False):
    """Every keyword of :func:`generate` but ``n``, for type checkers."""

    cache: Cache | Conversation | Sequence[Cache | Conversation] | None
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
    cache: Cache | Conversation | Sequence[Cache | Conversation] | None = None,
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
      n: samples of each prompt. Type checkers infer the returned type where it is a literal number.
      cache: an earlier ``output.cache`` (or one per prompt) to continue, with its policy and storage. It is not
        changed: the same one may be continued many times.
      consume_cache: donate ``cache`` instead; it cannot be used again.
      context: text that comes before every prompt; it is read and compressed once, before any prompt is seen.
      keywords: fields of :class:`kvjax.GenerationOptions`, in place of those of ``options``:

    Returns:
      An :class:`Output`; a list of them for a list of prompts; for n > 1 a list of n instead of each.

    Raises:
      UsageError: a request that makes no sense, in one sentence.
      DoesNotFit: too large for the device; the sentence says what would fit. A list of prompts that do not fit together
        is still answered, as many at a time as fit, also onto a cache whose context rows can share; the outputs then
        have no caches.
    """
    chosen = merged("generate", options, keywords, also=("n", *_CALL))
    true_or_false("consume_cache", consume_cache)
    try:
        request = Request(lm, prompt, chosen, n=n, cache=cache, context=context)
    except DoesNotFit as error:
        prompts, single = as_list(prompt)
        if single or n > 1 or context is not None or chosen.max_new_tokens == 0:
            raise
        return _as_many_as_fit(lm, prompts, chosen, cache, consume_cache, error)
    return answer(request, consume_cache)


def _as_many_as_fit(
    lm: LanguageModel, prompts: Prompts, options: GenerationOptions, cache: Any, consume: bool, error: DoesNotFit
) -> list[Output]:
    """The outputs of prompts that do not fit together, or the ``error`` that says so."""
    if cache is None:
        in_slots = not parse(options.policy or "full").offloads_rounds
    else:  # of one row, whose context the slots of an engine share
        in_slots = error.batch > 0 and is_row(cache) and shares(cache.policy, cache.storage)
    if in_slots and not spans_processes(lm):
        with contextlib.suppress(DoesNotFit):  # then what was said of all of them is the sentence
            outputs = answer_many(lm, prompts, options, cache)
            if cache is not None and consume:
                delete(cache)
            return outputs
    if cache is not None and error.batch:
        told = DoesNotFit(f"{str(error)[:-1]}; ask {error.batch} in a call, and the others in later ones.")
        told.plan, told.batch = error.plan, error.batch
        raise told from error
    raise error


def answer(request: Request, consume_cache: bool = False, between: Callable[[], None] | None = None) -> Any:
    """Run a checked request and return its outputs; ``between`` is called after every chunk of tokens."""
    with running(request) as session:
        session.prefill(consume_cache)
        with progress.stage("decode", total=request.options.max_new_tokens) as stage:
            for _ in session.results(CHUNK):
                stage.update(max(map(len, session.tokens)))
                if between is not None:
                    between()
        return session.outputs()


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
    """Like :func:`generate` for one prompt, yielding text as it is generated; the last piece has the whole ``output``.

    Pieces end at whole characters, and text that may be the beginning of a stop string is held back. Bad requests are
    refused at the call, not at the first piece.

    Args:
      lm, prompt, options, cache, consume_cache, context: as for :func:`generate`.
      keywords: fields of :class:`kvjax.GenerationOptions`, in place of those of ``options``:
    """
    chosen = merged("stream_generate", options, keywords, also=_CALL)
    true_or_false("consume_cache", consume_cache)
    request = Request(lm, prompt, chosen, cache=cache, context=context)
    if not request.tokens.single:
        raise UsageError("stream_generate takes one prompt; use generate for a list.")
    return _stream(request, consume_cache)


def _stream(request: Request, consume: bool) -> Iterator[Piece]:
    # Told between two pieces alone: meanwhile the reader has the terminal.
    place = progress.reporter(request.options.progress)
    with compile_clock() as clock, interruptible() as interrupt, Session(request, clock, interrupt) as session:
        with progress.telling(place):
            session.prefill(consume)
        text, results = TextStream(request.lm.tokenizer, request.options.stop_strings), session.results(_STREAM_STEPS)
        while True:
            with progress.telling(place):
                result = next(results, None)
            if result is None:
                break
            piece = text.add(result.tokens[0])
            if piece or result.tokens[0]:
                yield Piece(piece, tuple(result.tokens[0]))
            place.restart()
        with progress.telling(place):
            output = session.outputs()
    yield Piece(text.rest(), (), output)
