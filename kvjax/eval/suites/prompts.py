"""Items as token ids: what is compressed, and what is asked after it."""

from __future__ import annotations

import dataclasses
import itertools

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.eval.needle_prompts import template_tokens
from kvjax.eval.suites.item import Item


@dataclasses.dataclass(frozen=True)
class Prepared:
    """One item's ids.

    Attributes:
      context: what can be compressed before any question is known.
      earlier: what is read onto it before ``question``: the dialogue's earlier questions, each from the second on with
        the answer to the one before it.
      choices: of each continuation whose log-probability is taken.
    """

    item: Item
    context: list[int]
    question: list[int]
    earlier: tuple[list[int], ...] = ()
    choices: tuple[list[int], ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the whole prompt."""
        return len(self.context) + sum(map(len, self.earlier)) + len(self.question)

    @property
    def answer_tokens(self) -> int:
        """Tokens of the longest answer."""
        return max(map(len, self.choices), default=self.item.max_new_tokens)

    @property
    def shared(self) -> tuple[tuple[int, ...], ...]:
        """The prompt up to the question; items with the same one can ask the same cache."""
        return tuple(self.context), *map(tuple, self.earlier)

    def in_view(self) -> Prepared:
        """The same with its first question as part of the context, so that it is compressed in view of it.

        Where continuations are scored the question's last token is read with them, after the compression: a
        log-probability belongs to a prompt of at least one token.
        """
        if self.earlier:
            first, *rest = self.earlier
            return dataclasses.replace(self, context=self.context + first, earlier=tuple(rest))
        kept = len(self.question) - 1 if self.choices else len(self.question)
        return dataclasses.replace(
            self, context=self.context + self.question[:kept], question=self.question[kept:], earlier=()
        )


def prepare(lm: LanguageModel, item: Item) -> Prepared:
    """The ids of an item, in the chat template where the item and the model have one.

    Ids and not messages, because a benchmark's text must reach the model unchanged.

    Raises:
      UsageError: the prompt and its answer exceed the model's context.
    """
    encode, goes_on = lm.tokenizer.encode, lm.tokenizer.encode_after
    before, *turns = _texts(lm, item)
    first = [] if item.chat and lm.tokenizer.has_chat_template else list(lm.tokenizer.prefix_ids)
    *earlier, question = (goes_on(turn) if before or nth else encode(turn) for nth, turn in enumerate(turns))
    choices = tuple(_following(lm, turns[-1], question, choice) for choice in item.choices)
    found = Prepared(item, [*first, *encode(before)], question, tuple(earlier), choices)
    if not found.context:
        raise UsageError(f"{item.id} has no context to compress.")
    if not (found.question and all(found.earlier) and all(choices)):
        raise UsageError(f"{item.id} has a question or a choice without any token.")
    answer = found.answer_tokens
    if found.tokens + answer > lm.config.max_position:
        raise UsageError(
            f"{item.id} takes {found.tokens} tokens and {answer} of answer; the model's context is "
            f"{lm.config.max_position}."
        )
    return found


def _following(lm: LanguageModel, before: str, ids: list[int], text: str) -> list[int]:
    """The ids of a text that goes on after another, whose own ids are ``ids``.

    Both are encoded together, as lm-evaluation-harness does; where they meet in a token, the text on its own.
    """
    for encode in (lm.tokenizer.encode_after, lm.tokenizer.encode):
        whole = encode(before + text)
        if whole[: len(ids)] == ids:
            return whole[len(ids) :]
    return lm.tokenizer.encode_after(text)


def tokens_of(lm: LanguageModel, item: Item) -> int:
    """Tokens of an item's prompt with its longest answer, be they more than the model's context or not."""
    unlimited = dataclasses.replace(lm, config=dataclasses.replace(lm.config, max_position=10**9))
    found = prepare(unlimited, item)
    return found.tokens + found.answer_tokens


def _texts(lm: LanguageModel, item: Item) -> list[str]:
    """The context, then each turn's text up to where its answer begins."""
    questions = [*(question for question, _ in item.earlier), item.question]
    answers = [answer for _, answer in item.earlier]
    if not (item.chat and lm.tokenizer.has_chat_template):
        later = (f"{answer}\n\n{question}" for answer, question in zip(answers, questions[1:], strict=True))
        turns = [questions[0], *later]
        turns[-1] += item.answer_prefix
        return [item.context, *turns]
    user = {"role": "user", "content": item.context + questions[0]}
    messages, texts = [user], [lm.tokenizer.render([user])]
    for answer, question in zip(answers, questions[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        texts.append(lm.tokenizer.render(messages))
    # Templates may strip the ends of a message; the words are found by what they cannot take away.
    asked = questions[0].strip()
    place = texts[0].rfind(asked)
    follows = all(new.startswith(old) for old, new in itertools.pairwise(texts))
    if not asked or place < 0 or not follows:
        raise UsageError(f"The model's chat template changes the words of {item.id}; it cannot be asked.")
    later = [new[len(old) :] for old, new in itertools.pairwise(texts)]
    turns = [texts[0][place:], *later]
    turns[-1] += item.answer_prefix.lstrip()
    return [texts[0][:place], *turns]


def room_of(lm: LanguageModel, length: int | None, max_new_tokens: int, *, chat: bool = True) -> int:
    """Tokens that a prompt's own words may take beside the answer and, of a ``chat``, the template."""
    most = min(length or lm.config.max_position, lm.config.max_position)
    template = template_tokens(lm) if chat else len(lm.tokenizer.prefix_ids)
    room = most - template - max_new_tokens
    if room < 16:
        raise UsageError(f"{most} tokens are too few for an answer of {max_new_tokens} and its prompt.")
    return room


def cut_middle(lm: LanguageModel, context: str, question: str, room: int) -> tuple[str, str]:
    """Context and question without the middle of the prompt, where it exceeds ``room`` tokens.

    LongBench's way: the first and the last half of the tokens, as text again. A question that is longer than half of
    the room loses its beginning. Tokens are counted as they are read, the question's after the context's: cut there, a
    text may take more than it does whole.
    """
    encode, after, decode = lm.tokenizer.encode, lm.tokenizer.encode_after, lm.tokenizer.decode

    def over(before: str, asked: str) -> int:
        return len(encode(before)) + len(after(asked)) - room

    if over(context, question) <= 0:
        return context, question
    whole = encode(context + question)
    keep = min(room, len(whole) - 1)
    while True:
        half = keep // 2
        head, tail = decode(whole[:half]), decode(whole[-half:])
        found = (head + tail[: len(tail) - len(question)], question) if tail.endswith(question) else (head, tail)
        # Two halves may meet in more tokens than they had; the benchmark has room to spare, a model's context has not.
        if (more := over(*found)) <= 0:
            return found
        keep -= max(more, 2)
