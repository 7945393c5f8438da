"""Items as token ids: what is compressed, and what is asked after it."""

from __future__ import annotations

import dataclasses

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.eval.needle import template_tokens
from kvjax.eval.suites.item import Item


@dataclasses.dataclass(frozen=True)
class Prepared:
    """One item's ids: ``context``, what can be compressed before ``question`` is known."""

    item: Item
    context: list[int]
    question: list[int]

    @property
    def tokens(self) -> int:
        """Tokens of the whole prompt."""
        return len(self.context) + len(self.question)


def prepare(lm: LanguageModel, item: Item) -> Prepared:
    """The ids of an item, in the chat template where the item and the model have one.

    Ids and not messages, because a benchmark's text must reach the model unchanged.

    Raises:
      UsageError: the prompt and its answer exceed the model's context.
    """
    tokenizer = lm.tokenizer
    before, after = item.context, item.question + item.answer_prefix
    first: list[int] = []
    if item.chat and tokenizer.has_chat_template:
        text = tokenizer.render([{"role": "user", "content": item.context + item.question}])
        # Templates may strip the ends of a message; the words are found by what they cannot take away.
        asked = item.question.strip()
        place = text.rfind(asked)
        if not asked or place < 0:
            raise UsageError(f"The model's chat template changes the words of {item.id}; it cannot be asked.")
        before, after = text[:place], text[place:] + item.answer_prefix.lstrip()
    else:
        first = list(tokenizer.prefix_ids)
    found = Prepared(item, [*first, *tokenizer.encode(before)], tokenizer.encode(after))
    if not found.context:
        raise UsageError(f"{item.id} has no context to compress.")
    if found.tokens + item.max_new_tokens > lm.config.max_position:
        raise UsageError(
            f"{item.id} takes {found.tokens} tokens and {item.max_new_tokens} of answer; the model's context is "
            f"{lm.config.max_position}."
        )
    return found


def room_of(lm: LanguageModel, length: int | None, max_new_tokens: int) -> int:
    """Tokens that a prompt's own words may take beside the template and the answer."""
    most = min(length or lm.config.max_position, lm.config.max_position)
    room = most - template_tokens(lm) - len(lm.tokenizer.prefix_ids) - max_new_tokens
    if room < 16:
        raise UsageError(f"{most} tokens are too few for an answer of {max_new_tokens} and its prompt.")
    return room


def cut_middle(lm: LanguageModel, context: str, question: str, room: int) -> tuple[str, str]:
    """Context and question without the middle of the prompt, where it exceeds ``room`` tokens.

    LongBench's way: the first and the last half of the tokens, as text again. A question that is longer than half of
    the room loses its beginning.
    """
    encode, decode = lm.tokenizer.encode, lm.tokenizer.decode
    whole, keep = encode(context + question), room
    while len(whole) > room:
        half = keep // 2
        head, tail = decode(whole[:half]), decode(whole[-half:])
        found = (head + tail[: -len(question)], question) if tail.endswith(question) else (head, tail)
        # Two halves may meet in more tokens than they had; the benchmark has room to spare, a model's context has not.
        over = len(encode(found[0] + found[1])) - room
        if over <= 0:
            return found
        keep -= max(over, 2)
    return context, question
