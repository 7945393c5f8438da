"""``score``: log-probabilities of given tokens under a compressed cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Unpack

from kvjax.cache.cache import Cache
from kvjax.checkpoints.load import LanguageModel, check_model
from kvjax.errors import DoesNotFit, UsageError, quoted
from kvjax.options import OF_ANSWERS, GenerationOptions, ReadKeywords, merged_for_reading, shows_options
from kvjax.output import Score
from kvjax.prompts import Prompt, Prompts, as_list, token_ids
from kvjax.request import Request
from kvjax.rounds.conversation import Conversation
from kvjax.runtime.decode import CHUNK
from kvjax.runtime.prefill_batches import read_prompts
from kvjax.runtime.token_logprobs import next_logprobs, next_tokens
from kvjax.session import Session, running

#: Text or token ids.
ScoredText = str | Sequence[int]
#: Of each row the log-probabilities of its tokens, and the likeliest token in each place.
_Found = tuple[list[list[float]], list[list[int]]]


@shows_options(OF_ANSWERS)
def score(
    lm: LanguageModel,
    prompt: Prompt | Prompts,
    continuation: ScoredText | Sequence[ScoredText],
    options: GenerationOptions | None = None,
    *,
    way: Literal["prefill", "decode"] = "prefill",
    cache: Cache | Conversation | Sequence[Cache | Conversation] | None = None,
    context: str | Sequence[int] | None = None,
    **keywords: Unpack[ReadKeywords],
) -> Any:
    """Log-probabilities of given tokens after a prompt, under the compressed cache.

    Both ways read and compress the prompt as :func:`kvjax.generate` does, so the continuation's first token has the
    same log-probability in both. After it they differ:

    * "prefill" reads the continuation as one chunk, as it would a later prompt: its tokens see what the policy kept of
      the prompt, and all of the continuation before them. A policy that reads prompts in chunks compresses in between.
      One pass, so it is the fast one.
    * "decode" feeds one token at a time, in the compiled loop that generates, so the policy evicts while the
      continuation grows. The tokens that ``generate`` gives have here the log-probabilities that it returned.

    Args:
      lm: a model from :func:`kvjax.load`.
      prompt: as for ``generate``, one or a list.
      continuation: text, encoded as it is (give the ids if the end of an answer should count), or token ids, which
        follow the prompt; with one prompt a list of them, of which each follows it; with several prompts one for each,
        or one for all.
      way: "prefill" or "decode".
      options: may be those of an answer; only the fields that say how a cache is made count here.
      cache, context: as for ``generate``; a cache remains a value.
      keywords: fields of :class:`kvjax.GenerationOptions`, in place of those of ``options``:

    Returns:
      A :class:`kvjax.Score`; a list of them where prompts or continuations are lists.

    Raises:
      UsageError: a request that makes no sense, in one sentence.
      DoesNotFit: too large for the device.
    """
    asked = merged_for_reading("score", options, keywords, also=("way", "cache", "context"))
    if not isinstance(way, str) or way not in ("prefill", "decode"):
        raise UsageError(f'way is {quoted(way)}; give "prefill" or "decode".')
    check_model(lm)
    prompts, single = as_list(prompt)
    answers, one = _answers(lm, continuation)
    if not single and one:
        answers = answers * len(prompts)
    elif not single and len(answers) != len(prompts):
        counts = f"{len(prompts)} prompts and {len(answers)} continuations"
        raise UsageError(f"There are {counts}; give one for each prompt, or one for all.")
    chosen = dataclasses.replace(asked, max_new_tokens=max(map(len, answers)), logprobs=True)
    samples = len(answers) // len(prompts)
    request = Request(lm, prompt, chosen, n=samples, cache=cache, context=context, answers=answers)
    if way == "prefill" and request.policy.offloads_rounds:
        raise UsageError(
            'Under RoundAttention a continuation is scored token by token, as it is generated; give way="decode".'
        )
    with running(request) as session:
        session.prefill()
        found = _by_prefill(session) if way == "prefill" else _by_decode(session)
    scores = [Score(ids, tuple(values), tuple(best)) for ids, values, best in zip(answers, *found, strict=True)]
    return scores[0] if single and one else scores


def _answers(lm: LanguageModel, continuation: Any) -> tuple[list[tuple[int, ...]], bool]:
    """The ids of every continuation, and whether one was given outside any list."""
    given, one = as_list(continuation, "continuation")
    return [token_ids(lm, each, "continuation") for each in given], one


def _by_prefill(session: Session) -> _Found:
    """Every row's answer read at once onto the prompts' cache, which it consumes."""
    request, cache = session.request, session.cache
    answers = request.answers or ()
    firsts = next_logprobs(session.logits, range(len(answers)), [ids[0] for ids in answers])
    bests = next_tokens(session.logits, range(len(answers)))
    found: list[list[float]] = [[] for _ in answers]
    best: list[list[int]] = [[] for _ in answers]
    if max(map(len, answers)) > 1:
        kinds: dict[str, Any] = {"policy": request.policy, "dtype": request.dtype, "storage": request.storage}
        kinds |= {"programs": request.programs, "size": request.size, "logprobs": found, "best": best}
        read_prompts(request.lm.params, answers, cache=cache, consume=True, **kinds)
    if session.interrupted:
        raise KeyboardInterrupt
    logprobs = [[first, *rest] for first, rest in zip(firsts, found, strict=True)]
    return logprobs, [[first, *rest] for first, rest in zip(bests, best, strict=True)]


def _by_decode(session: Session) -> _Found:
    """Every row's answer fed token by token in the loop that generates."""
    for _ in session.chunks(CHUNK):
        pass
    found, wanted = session.logprobs or [], session.request.answers or ()
    if any(len(logprobs) < len(ids) for logprobs, ids in zip(found, wanted, strict=True)):
        if session.interrupted:
            raise KeyboardInterrupt
        raise DoesNotFit(
            f"The cache would outgrow the memory after {min(map(len, found))} tokens of the continuation; "
            "a shorter one would fit."
        )
    return found, session.tokens
