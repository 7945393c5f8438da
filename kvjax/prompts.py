"""Turns what a user passes (text, messages, token ids) into the token ids a model reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.checkpoints.load import LanguageModel, check_model
from kvjax.errors import UsageError, kind_of, quoted
from kvjax.policies.base import Policy
from kvjax.policies.best import Resolved, resolve

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]
Prompts = Sequence[str] | Sequence[Sequence[Message]] | Sequence[Sequence[int]] | Sequence[Prompt]

# Stands where the user's words go while a chat template is rendered, to cut the rendered text there.
_MARK = "\u2063kvjax\u2063"
_SEPARATOR = "\n\n"


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The ids to read: ``context`` once for all prompts, then each of ``prompts``.

    Attributes:
      context: ids shared by all prompts, or () without a context.
      prompts: ids of each prompt, what follows the context.
      templated: of each prompt, whether the chat template wrote it.
      single: whether one prompt was passed, and not a list of one.
      open: of each prompt that is read and not answered, whether it ends within a user's message.
    """

    context: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    templated: tuple[bool, ...]
    single: bool
    open: tuple[bool, ...] = ()


def as_told(lm: LanguageModel, policy: Policy) -> Policy:
    """The policy with the token ids of what it has the model read beside prompts, if anything."""

    def answer() -> str:
        if not lm.tokenizer.has_chat_template:
            return "\n"
        _, mark, after = lm.tokenizer.render([{"role": "user", "content": _MARK}]).partition(_MARK)
        return after if mark else "\n"

    return policy.with_words(lambda text: tuple(lm.tokenizer.encode(text)), answer)


def opening_tokens(lm: LanguageModel) -> list[int]:
    """The token ids that the chat template writes before a user's first words; none without a template."""
    if not lm.tokenizer.has_chat_template:
        return []
    before, mark, _ = lm.tokenizer.render([{"role": "user", "content": _MARK}]).partition(_MARK)
    return lm.tokenizer.encode(before) if mark else []


def matching(lm: LanguageModel, asked: Policy, policy: Policy) -> Resolved | None:
    """The policy that was asked for where a cache's is that, or, of ``best``, what it may have become; else None."""
    found = (resolve(asked, lm.config, later=later) for later in (True, False))
    return next((one for one in found if as_told(lm, one.policy) == policy), None)


def chat_tokens(lm: LanguageModel, messages: str | Sequence[Message]) -> list[int]:
    """The token ids that :func:`kvjax.generate` reads for messages: the model's chat template, encoded.

    Args:
      lm: a model from :func:`kvjax.load`, with a chat template.
      messages: {"role", "content"} each, or the text of a user's only message. After them stands the opening of the
        assistant's answer; a last message of the assistant's is the answer's beginning, and is left open.

    Returns:
      Ids, which ``generate`` takes as a prompt: the answer is that to the messages.

    Raises:
      UsageError: no messages, a message without role or content, or a model without a chat template.
    """
    check_model(lm)
    if isinstance(messages, (list, tuple)) and not messages:
        raise UsageError("There are no messages; give at least one.")
    items, single = as_list(messages)
    if not single or (not isinstance(items[0], str) and not all(isinstance(item, Mapping) for item in items[0])):
        raise UsageError("chat_tokens takes one list of messages, or the text of one; call it for each of several.")
    return list(_render(lm, items[0], None, True, False, False)[1])


def read_tokens(lm: LanguageModel, prompt: Any, chat: bool) -> Tokens:
    """Render and encode what is read and not answered: texts, messages or ids, one or a list of them.

    A user's last message stays open: a question goes on with it, as one does with ``context``. An assistant's last
    message stays open too, and the next turn ends it.

    Raises:
      UsageError: nothing to read, or something that is none of the accepted forms.
    """
    prompts, single = as_list(prompt)
    found = [_read_only(lm, one, chat) for one in prompts]
    return Tokens((), tuple(ids for ids, _ in found), (False,) * len(found), single, tuple(open for _, open in found))


def _read_only(lm: LanguageModel, prompt: Prompt, chat: bool) -> tuple[tuple[int, ...], bool]:
    """(ids, whether they end within a user's message) of what is read and not answered."""
    items = _checked(prompt)
    if not chat or (not isinstance(items, str) and not isinstance(items[0], Mapping)):
        return _render(lm, items, None, chat, False, False)[1], False
    messages = _messages(items)
    role = messages[-1]["role"]
    if role not in ("user", "assistant"):
        messages.append({"role": "user", "content": _MARK})
    else:
        messages[-1]["content"] += _SEPARATOR + _MARK if role == "user" else _MARK
    return tuple(lm.tokenizer.encode(_halves(lm, messages)[0])), role != "assistant"


def tokenize(
    lm: LanguageModel,
    prompt: Prompt | Sequence[Prompt],
    *,
    context: str | Sequence[int] | None,
    chat: bool,
    onto: bool,
    open_messages: Sequence[bool] = (),
) -> Tokens:
    """Render and encode prompts.

    Args:
      lm: the model, for its tokenizer and chat template.
      prompt: one prompt or a list of them.
      context: text (or, without chat, ids) that precedes every prompt.
      chat: apply the chat template to text and messages; ids are always taken as they are.
      onto: the prompts continue a conversation that is already in a cache.
      open_messages: then, of each prompt, whether that ends within a user's message, which the prompt goes on.

    Raises:
      UsageError: nothing to read, or something that is none of the accepted forms.
    """
    prompts, single = as_list(prompt)
    if context is not None and onto:
        raise UsageError("context= starts a new cache; give either context= or cache=, not both.")
    if context is not None:
        _check_context(context)
    goes_on = open_messages or [False] * len(prompts)
    rendered = [_render(lm, p, context, chat, onto, on) for p, on in zip(prompts, goes_on, strict=True)]
    prefixes = {prefix for prefix, _ in rendered}
    if len(prefixes) > 1:
        raise UsageError("context= is read once for all prompts, so their system messages must be the same.")
    shared = prefixes.pop()
    ids = tuple(item for _, item in rendered)
    if context is not None and not shared:
        raise UsageError("The context has no tokens; give the text to compress, or leave context= out.")
    return Tokens(shared, ids, tuple(chat and not _is_ids(p) for p in prompts), single)


def _check_context(context: Any) -> None:
    if isinstance(context, (bytes, bytearray)) or not (isinstance(context, Sequence) or _is_array(context)):
        raise UsageError(f"context is {kind_of(context)}; give text, or a list of token ids with chat=False.")
    if not len(context):
        raise UsageError("The context is empty; give the text to compress, or leave context= out.")


def as_list(prompt: Any, what: str = "prompt") -> tuple[list[Prompt], bool]:
    """Prompts as a list, and whether there was one outside any list; ``what`` they are called in a sentence."""
    if isinstance(prompt, str):
        return [prompt], True
    if isinstance(prompt, Mapping) and what == "prompt":
        raise UsageError("A single message was given; give a list of messages.")
    items = _plain(_sequence(prompt, what))
    if not items:
        raise UsageError(f"The list of {what}s is empty; give at least one {what}.")
    for kind, name in ((_is_message, "messages"), (_is_id, "token ids")):
        other = [item for item in items if not kind(item)]
        if not other:
            return [items], True
        if len(other) < len(items):
            raise UsageError(f"A list of {name} holds {quoted(other[0])}; a {what} is of one kind.")
    return items, False


def token_ids(lm: LanguageModel, text: Any, what: str) -> tuple[int, ...]:
    """The ids of text, encoded as it is, or of a list of them; UsageError for anything else, or nothing."""
    items = text if isinstance(text, str) else _plain(_sequence(text, what))
    ids = _ids(lm, items, what)
    if not ids:
        raise UsageError(f"A {what} has no tokens; give at least one character.")
    return ids


def _sequence(prompt: Any, what: str = "prompt") -> Any:
    """Check that a value can hold messages, token ids or prompts, and return it."""
    if isinstance(prompt, (bytes, bytearray, memoryview)) or not (isinstance(prompt, Sequence) or _is_array(prompt)):
        forms = "text, a list of messages, or" if what == "prompt" else "text or"
        raise UsageError(f"A {what} is {forms} a list of token ids; {kind_of(prompt)} was given.")
    return prompt


def _is_array(items: Any) -> bool:
    return hasattr(items, "tolist") and getattr(items, "ndim", 0) > 0


def _plain(items: Any) -> list[Any]:
    """A list of what is in any sequence or array, with numbers of array libraries as Python's own."""
    if _is_array(items):
        return items.tolist()
    return [item.tolist() if getattr(item, "ndim", None) == 0 else item for item in items]


def _is_ids(prompt: Any) -> bool:
    return not isinstance(prompt, str) and all(_is_id(item) for item in _plain(prompt))


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping)


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _checked(prompt: Prompt) -> str | list[Any]:
    """A prompt that is text, or a list of messages alone or of ids alone; not empty."""
    items = prompt if isinstance(prompt, str) else _plain(_sequence(prompt))
    if not items:
        what = "The prompt is empty; give at least one character."
        raise UsageError(what if isinstance(items, str) else "A prompt is empty; give text, messages or token ids.")
    one_kind = isinstance(items, str) or all(map(_is_id, items)) or all(isinstance(item, Mapping) for item in items)
    if not one_kind:
        raise UsageError("A prompt is text, a list of messages, or a list of token ids, not a mixture of them.")
    return items


def _render(
    lm: LanguageModel, prompt: Prompt, context: str | Sequence[int] | None, chat: bool, onto: bool, goes_on: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ids of the shared prefix, ids of the rest) of one prompt."""
    items = _checked(prompt)
    if not isinstance(items, str) and _is_id(items[0]):
        if isinstance(context, str):  # as it is read by itself: ids go on with it as with its cache
            prefix = _read_only(lm, context, chat and lm.tokenizer.has_chat_template)[0]
        else:
            prefix = _ids(lm, context, "context")
        return prefix, _ids(lm, items, "prompt")
    if not chat:
        if not isinstance(items, str):
            raise UsageError("Messages need the chat template; pass text or token ids with chat=False.")
        prefix = _ids(lm, context, "context")
        if isinstance(context, str):
            prefix = (*lm.tokenizer.prefix_ids, *prefix)
        if context is not None or onto:
            return prefix, tuple(lm.tokenizer.encode_after(items))
        return prefix, (*lm.tokenizer.prefix_ids, *lm.tokenizer.encode(items))
    if context is not None and not isinstance(context, str):
        if any(isinstance(part, str) for part in context):
            raise UsageError("context is one text for all prompts, and a list of texts was given; join them.")
        if any(isinstance(part, Mapping) for part in context):
            raise UsageError("context is text, and messages were given; read them by kvjax.read, and give cache=.")
        raise UsageError("A context of token ids cannot go into a chat template; pass it as text, or chat=False.")
    return _render_chat(lm, _messages(items), context, onto, goes_on)


def _ids(lm: LanguageModel, items: str | Sequence[int] | None, what: str) -> tuple[int, ...]:
    if items is None:
        return ()
    if isinstance(items, str):
        return tuple(lm.tokenizer.encode(items))
    ids = _plain(items)
    for token in ids:
        if isinstance(token, Mapping):
            raise UsageError(f"The {what} holds a message, {quoted(token)}; give text or token ids.")
        if not _is_id(token) or not 0 <= token < lm.config.vocab_size:
            raise UsageError(
                f"The {what} holds the token id {quoted(token)}; this model's ids go from 0 to "
                f"{lm.config.vocab_size - 1}."
            )
    return tuple(ids)


def _messages(items: str | Sequence[Any]) -> list[dict[str, Any]]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages = [dict(item) for item in items]
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise UsageError('A message needs "role" and "content" as text, as in {"role": "user", "content": "Hi"}.')
    return messages


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as a list of their own; UsageError for anything else, or one without a role and text."""
    items = _plain(messages) if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)) else [None]
    if not all(isinstance(item, Mapping) for item in items):
        raise UsageError('Messages are a list of dictionaries, as in [{"role": "user", "content": "Hi"}].')
    return _messages(items)


def prefix_tokens(lm: LanguageModel, prompt: Prompt, ids: Sequence[int]) -> int:
    """Count the ids of a templated prompt before the user's first words: the system prompt, above all."""
    if _is_ids(prompt):
        return 0
    messages = _messages(prompt if isinstance(prompt, str) else _plain(_sequence(prompt)))
    user = next((message for message in messages if message["role"] == "user"), None)
    if user is None:
        return 0
    user["content"] = _MARK
    before = lm.tokenizer.encode(lm.tokenizer.render(messages).partition(_MARK)[0])
    same = (one == other for one, other in zip(before, ids, strict=False))
    return next((i for i, equal in enumerate(same) if not equal), min(len(before), len(ids)))


def _halves(lm: LanguageModel, messages: list[dict[str, Any]]) -> tuple[str, str]:
    """The text before and after the mark in a user's message, or in the last one, as the chat template writes it."""
    before, mark, after = lm.tokenizer.render(messages).partition(_MARK)
    if not mark:
        raise UsageError("This model's chat template changes the words of messages; give text with chat=False.")
    return before, after


def _render_chat(
    lm: LanguageModel, messages: list[dict[str, Any]], context: str | None, onto: bool, goes_on: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Apply the chat template; a last message of the assistant's is the beginning of the answer."""
    answer = ""
    if messages[-1]["role"] == "assistant":
        answer = messages.pop()["content"]
        if not messages and not onto:
            raise UsageError("The only message is the beginning of an answer; give a message before it.")
    if goes_on and (not messages or messages[0]["role"] != "user"):
        raise UsageError(
            "The cache ends within a user's message, which the prompt goes on; give text, or messages that begin with "
            "the user's."
        )
    if goes_on:
        context = "."  # what stands there does not change what comes after it
    elif onto:
        # After an answer this template writes the end of that message, then the new ones.
        history = [{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}]
        text = lm.tokenizer.render([*history, *messages])
        before, mark, after = text.partition(_MARK)
        if not mark:
            raise UsageError("This model's chat template hides earlier answers; continue the cache with chat=False.")
        return (), tuple(lm.tokenizer.encode_after(after + answer))
    if context is None:
        return (), tuple(lm.tokenizer.encode(lm.tokenizer.render(messages) + answer))
    user = next((m for m in messages if m["role"] == "user"), None)
    if user is None:
        raise UsageError("context= goes in front of the first user message, and these messages have none.")
    question = user["content"]
    user["content"] = context + _SEPARATOR + _MARK
    before, after = _halves(lm, messages)
    rest = tuple(lm.tokenizer.encode_after(question + after + answer))
    return () if goes_on else tuple(lm.tokenizer.encode(before)), rest
