"""``read``: what is asked about later is read and compressed now, and left as a cache."""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack

import numpy as np

from kvjax.cache.buckets import prompt_bucket
from kvjax.cache.cache import NO_TOKEN, OPEN_MESSAGE, Cache
from kvjax.cache.continuation import Continuation, delete
from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import true_or_false
from kvjax.errors import UsageError
from kvjax.options import OF_ANSWERS, GenerationOptions, ReadKeywords, merged_for_reading, shows_options
from kvjax.prompts import Prompt, Prompts
from kvjax.request import Request
from kvjax.rounds.conversation import Conversation
from kvjax.session import running


@shows_options(OF_ANSWERS)
def read(
    lm: LanguageModel,
    text: Prompt | Prompts,
    options: GenerationOptions | None = None,
    *,
    once: bool = False,
    **keywords: Unpack[ReadKeywords],
) -> Cache | Conversation:
    """Read text or messages once, compress them, and answer nothing: a cache to ask many questions of.

    ``generate(lm, question, cache=cache)`` gives, token for token, what ``generate(lm, question, context=text)`` does:
    a user's message that was read last is still open, and the question goes on with it. The same holds for a
    :class:`kvjax.Chat` with this cache. The cache remains a value: questions do not see each other.

    Args:
      lm: a model from :func:`kvjax.load`.
      text: text; a list of messages ({"role", "content"}), of which a last one of the user's goes on with the question,
        one of the assistant's is an answer that the next turn follows, and after one of the system's the user's
        begins; a list of token ids; or a list of such, which are read as one batch and give a row each.
      options: may be those of the later questions; only the fields that say how a cache is made count here.
      once: the policy chooses among the text's tokens and never again: what is read and decoded later is all kept, and
        any number of questions shares the slots that were chosen. For one text, and policies that choose when a prompt
        is read. Without it they choose anew with every question, and each question has a copy.
      keywords: fields of :class:`kvjax.GenerationOptions`, in place of those of ``options``:

    Returns:
      A cache of a row per text, or under :class:`kvjax.RoundAttention` a :class:`kvjax.Conversation` of one round, to
      pass as ``cache=`` (``cache.row(i)`` for one of several), or to keep with :func:`kvjax.save_cache`.

    Raises:
      UsageError: a request that makes no sense, in one sentence.
      DoesNotFit: too large for the device; the sentence says what would fit.
    """
    true_or_false("once", once)
    chosen = merged_for_reading("read", options, keywords, also=("once",))
    request = Request(lm, text, dataclasses.replace(chosen, max_new_tokens=0), read_only=True, once=once)
    if request.once:
        _check_once(request)
    with running(request) as session:
        session.prefill()
        found: Any = session.continuation()
    if request.once:
        sizes = {"prompt_capacity": prompt_bucket(len(request.prompts[0])), "dtype": request.dtype}
        chosen, found = found, request.programs.share_chosen(found, config=lm.config, **sizes)
        delete(chosen)
    elif found.device_layers.batch > request.rows:
        found = found.take(range(request.rows))  # without rows of padding
    return _left_open(found, request.tokens.open)


def _check_once(request: Request) -> None:
    """Refuse what cannot be one context of later rows."""
    if request.rows > 1:
        raise UsageError(f"once=True takes one text, which questions then share, and here are {request.rows}.")


def _left_open(cache: Continuation, open: tuple[bool, ...]) -> Any:
    """The cache, marked where a row ends within a user's message."""
    held = cache.device_layers
    marks = np.zeros((held.batch,), np.int32)
    marks[: len(open)] = open
    return cache.with_device_layers(held.replace(next_token=held.next_token + marks * (OPEN_MESSAGE - NO_TOKEN)))
