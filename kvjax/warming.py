"""``warm``: compiles what later calls will need, by the smallest calls that need it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kvjax import progress
from kvjax.cache.buckets import request_bucket
from kvjax.chat import Chat
from kvjax.checkpoints.load import LanguageModel, check_model
from kvjax.checks import true_or_false, whole_number
from kvjax.context import read
from kvjax.errors import DoesNotFit, UsageError, quoted
from kvjax.generation import answer
from kvjax.halving import largest
from kvjax.options import GenerationOptions, merged
from kvjax.ownership import Owned
from kvjax.policies import Policy, format_policy, parse
from kvjax.request import Request
from kvjax.runtime.compilation import compile_clock

_MOST = 2**20


@dataclasses.dataclass(frozen=True)
class Warmed:
    """The programs that one form of call compiled.

    Attributes:
      policy: its text form. batch: rows; 0 is a conversation. tokens: of the longest prompt that it serves.
      programs: compiled, or read from the folder that keeps them. seconds: that this took.
    """

    policy: str
    batch: int
    tokens: int
    programs: int
    seconds: float


def warm(
    lm: LanguageModel,
    *,
    lengths: Sequence[int] = (256,),
    policy: Policy | str | Sequence[Policy | str] | None = None,
    batch: Sequence[int] = (1,),
    chat: bool = False,
    **options: Any,
) -> list[Warmed]:
    """Compile the programs of calls like these, so that those wait for none of them.

    What is compiled stays in this process, and, unless switched off, in the folder that ``kvjax.load`` keeps compiled
    programs in. It runs the smallest call of each form: one token more than the next smaller bucket of lengths.

    Args:
      lm: the model.
      lengths: tokens of prompts.
      policy: one policy or several; None keeps all tokens.
      batch: numbers of prompts that will be answered together.
      chat: also compile a conversation: turns of each length and short ones.
      options: of the calls, as for :func:`kvjax.generate`; those that change the cache, such as ``storage``, count.
        With ``context=``, a text as long as those to come, the prompts and the conversation are read onto it, and
        onto the cache that :func:`kvjax.read` gives of it where that fits too.

    Returns:
      What each form compiled.

    Raises:
      UsageError: a length that the model's context does not hold, or an option that makes no sense.
      DoesNotFit: a call is too large for the device.
    """
    check_model(lm)
    true_or_false("chat", chat)
    policies = policy if isinstance(policy, (list, tuple)) else ["full" if policy is None else policy]
    if not policies:
        raise UsageError("The list of policies is empty; give at least one, or leave policy= out.")
    parsed = [parse(each) for each in policies]
    for name, values in (("lengths", lengths), ("batch", batch)):
        listed = isinstance(values, Sequence) or getattr(values, "ndim", 0) == 1
        if not listed or isinstance(values, str) or not len(values):
            raise UsageError(f"{name} is {quoted(values)}; give at least one number, in a list.")
        for value in values:
            whole_number(name, value, 1, _MOST)
    if max(lengths) > lm.config.max_position:
        raise UsageError(
            f"A prompt of {max(lengths)} tokens is beyond this model's context of {lm.config.max_position}."
        )
    found = []
    for each in parsed:
        for tokens in lengths:
            calls: list[tuple[int, Any]] = [(rows, _generating(lm, [0] * _least(tokens), rows)) for rows in batch]
            calls += [(0, _talking(lm, tokens))] * chat
            for rows, call in calls:
                with compile_clock() as clock:
                    call(policy=each, **{"max_new_tokens": 2, **options})
                found.append(Warmed(format_policy(each), rows, tokens, clock.programs, clock.seconds))
    return found


def _least(tokens: int) -> int:
    """The shortest prompt of the bucket that so many tokens are in."""
    return largest(1, tokens - 1, lambda fewer: request_bucket(fewer) < request_bucket(tokens)) + 1


def _generating(lm: LanguageModel, ids: list[int], rows: int) -> Any:
    """A call of so many prompts together; ``generate`` would answer what does not fit by the programs of an engine."""

    def call(*, n: int = 1, context: str | Sequence[int] | None = None, **options: Any) -> None:
        chosen = merged("warm", None, options, also=("n", "context"))
        prompts: Any = ids if rows == 1 else [ids] * rows
        answer(Request(lm, prompts, chosen, n=n, context=context))
        if context is not None:
            _onto_what_was_read(
                lm, context, chosen, lambda cache: answer(Request(lm, prompts, chosen, n=n, cache=cache))
            )

    return call


def _talking(lm: LanguageModel, tokens: int) -> Any:
    """Conversations that begin with so many tokens, on which their allocations depend: then as many and one, or one."""

    def turns(*, context: str | Sequence[int] | None = None, **options: Any) -> None:
        first = Chat(lm, **options).options
        later = dataclasses.replace(first, policy=None)
        for lengths in ([tokens, tokens, 1], [tokens, 1]):
            held = None
            for count in [length for i, length in enumerate(lengths) if sum(lengths[: i + 1]) < lm.config.max_position]:
                begun: dict[str, Any] = {"context": context} if held is None else {"cache": held}
                request = Request(lm, [0] * count, first if held is None else later, **begun)
                held = Owned(answer(request).cache)  # lent or not, as a chat does

    return turns


def _onto_what_was_read(
    lm: LanguageModel, context: str | Sequence[int], options: GenerationOptions, call: Callable[[Any], Any]
) -> None:
    """Call with a context as :func:`kvjax.read` leaves it: it stays its reader's, so it is copied by other programs."""
    how = {name: getattr(options, name) for name in ("policy", "storage", "chat", "memory_limit")}
    # The call that reads the context itself may fit where the copies of one that was read do not.
    with progress.showing(options.progress), contextlib.suppress(DoesNotFit):
        call(read(lm, context, **how))
