"""The prompts of a comparison at one length, with the record of their forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.eval.follow_ups import ANSWER_TOKENS, FollowUps, make_conversations
from kvjax.eval.needle_prompts import prompt_ids, template_tokens
from kvjax.eval.recorded import RecordedDecoder, record, record_bytes
from kvjax.eval.results import Settings
from kvjax.eval.ruler import answer_room, make_samples
from kvjax.prompts import Prompt, tokenize
from kvjax.tables import human_bytes


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts of one task, or the first turns of conversations; a row each.

    Attributes:
      task: its name; empty for conversations.
      contexts, questions: ids of each; the context is what can be compressed before the question is known. A
        conversation's first turn has no context of its own: all of it is the question.
      outputs: strings each right answer contains.
      room: tokens of an answer.
      made: the record of contexts with their questions.
    """

    task: str
    contexts: tuple[list[int], ...]
    questions: tuple[list[int], ...]
    outputs: tuple[tuple[str, ...], ...]
    room: int
    made: RecordedDecoder

    @property
    def wholes(self) -> list[list[int]]:
        return [context + question for context, question in zip(self.contexts, self.questions, strict=True)]


@dataclasses.dataclass(frozen=True)
class Talks:
    """Conversations, a row each."""

    first: Prompts
    conversations: tuple[FollowUps, ...]
    chat: bool

    def prompts(self, turn: int) -> list[Prompt]:
        """The prompts of a turn, 0 for the first."""
        return [conversation.prompt(turn, self.chat) for conversation in self.conversations]

    def outputs(self, turn: int) -> list[tuple[str, ...]]:
        """The strings that right answers in this turn contain."""
        return [(conversation.outputs[turn],) for conversation in self.conversations]


def check_length(lm: LanguageModel, settings: Settings, length: int) -> None:
    """Refuse a length beyond the model's context, or whose record the device cannot hold (UsageError)."""
    if not 1 <= length <= lm.config.max_position:
        raise UsageError(f"The length {length} is not within the model's context of {lm.config.max_position} tokens.")
    check_record(lm, (len(settings.tasks) + settings.turns) * settings.samples, length)


def check_record(lm: LanguageModel, prompts: int, length: int) -> None:
    """Refuse prompts whose record the device cannot hold (UsageError)."""
    need = record_bytes(lm.config, prompts, length, lm.params.dtype.itemsize)
    free = _free_bytes()
    if free is not None and need > free:
        raise UsageError(
            f"Recording {prompts} prompts of {length} tokens needs {human_bytes(need)} and {human_bytes(free)} are "
            "free; ask for fewer samples or shorter lengths."
        )


def _free_bytes() -> int | None:
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        import psutil

        return int(psutil.virtual_memory().available)
    stats = device.memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None


def make_prompts(lm: LanguageModel, settings: Settings, task: str, length: int) -> Prompts:
    """Samples of one task, run through the model once."""
    room = answer_room(lm.tokenizer, task)
    samples = make_samples(
        lm.tokenizer,
        task,
        length=length,
        samples=settings.samples,
        seed=settings.seed,
        max_new_tokens=room,
        template_tokens=template_tokens(lm),
    )
    contexts, questions = zip(*(prompt_ids(lm, sample) for sample in samples), strict=True)
    return _prompts(lm, task, contexts, questions, tuple(sample.outputs for sample in samples), room)


def make_talks(lm: LanguageModel, settings: Settings, length: int) -> Talks:
    """Conversations, their first turns run through the model once."""
    made = tuple(make_conversations(lm.tokenizer, length=length, samples=settings.samples, seed=settings.seed))
    chat = lm.tokenizer.has_chat_template
    first = [conversation.prompt(0, chat) for conversation in made]
    ids = [list(one) for one in tokenize(lm, first, context=None, chat=chat, onto=False).prompts]
    outputs = tuple((conversation.outputs[0],) for conversation in made)
    return Talks(_prompts(lm, "", tuple([] for _ in ids), tuple(ids), outputs, ANSWER_TOKENS), made, chat)


def _prompts(
    lm: LanguageModel,
    task: str,
    contexts: Sequence[list[int]],
    questions: Sequence[list[int]],
    outputs: tuple[tuple[str, ...], ...],
    room: int,
) -> Prompts:
    wholes = [context + question for context, question in zip(contexts, questions, strict=True)]
    return Prompts(task, tuple(contexts), tuple(questions), outputs, room, record(lm.params, wholes))
