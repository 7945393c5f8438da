"""A conversation that was held elsewhere: its messages are read at once, and each question and answer is a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.cache.quantisation import Storage
from kvjax.checkpoints.load import LanguageModel, check_model
from kvjax.errors import UsageError
from kvjax.options import GenerationOptions
from kvjax.prompts import check_messages, prefix_tokens, tokenize
from kvjax.request import Request
from kvjax.rounds.closing import close_round
from kvjax.rounds.conversation import Conversation
from kvjax.rounds.round_programs import RoundPrograms
from kvjax.rounds.turn import read_question


def history_ids(lm: LanguageModel, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
    """The ids that the turns of a conversation would have fed, and where each round begins.

    Args:
      messages: an optional system message, then user and assistant in turns, the assistant's last.

    Raises:
      UsageError: messages in another order.
    """
    messages = check_messages(messages)
    system = [message for message in messages[:1] if message["role"] == "system"]
    turns = messages[len(system) :]
    roles = [message["role"] for message in turns]
    if not turns or roles != ["user", "assistant"] * (len(turns) // 2):
        raise UsageError("A history is user and assistant messages in turns, ending with the assistant's.")
    ids: list[int] = []
    starts: list[int] = []
    for question, answer in zip(turns[::2], turns[1::2], strict=True):
        starts.append(len(ids))
        first = [*system, question] if not ids else [question]
        ids += tokenize(lm, first, context=None, chat=True, onto=bool(ids)).prompts[0]
        ids += lm.tokenizer.encode_after(answer["content"])
    return ids, starts


def read_history(
    lm: LanguageModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    policy: Any,
    storage: Storage | str | None = None,
    memory_limit: int | None = None,
) -> Conversation:
    """The conversation that these messages make, each question and answer a round; continue it with ``generate``.

    Every token sees all that came before it, as if nothing had been left out yet. The layers of all of it are on the
    device while it is read.

    Args:
      messages: as :func:`history_ids`. policy: a :class:`kvjax.RoundAttention` without ``inner``, or its text form.

    Raises:
      UsageError: messages or a policy of another kind, or longer than the model's context.
      DoesNotFit: too large for the device.
    """
    check_model(lm)
    ids, starts = history_ids(lm, messages)
    request = Request(lm, ids, GenerationOptions(policy=policy, storage=storage, memory_limit=memory_limit))
    chosen = request.policy
    if not chosen.offloads_rounds or getattr(chosen, "inner", None) is not None:
        raise UsageError("A history is read under RoundAttention without inner; a round is compressed when it ends.")
    prefix = max(request.prefix[0], prefix_tokens(lm, list(messages), ids))
    prefix = min(prefix, starts[1] if len(starts) > 1 else len(ids))
    programs = RoundPrograms(lm.mesh, lm.config)
    cache, _, asked = read_question(
        lm.params,
        [ids],
        policy=chosen,  # pyright: ignore[reportArgumentType]
        before=None,
        prefix=[prefix],
        consume=False,
        dtype=request.dtype,
        storage=request.storage,
        memory_limit=memory_limit,
        programs=programs,
    )
    conversation = close_round(lm.params, asked, cache, [ids], [starts[1:]], programs=programs)
    return conversation if conversation.lower.batch == 1 else conversation.take([0])
