"""The suite ``dialogues``: MT-Bench-101's dialogues of several turns, each reference reply scored under the cache."""

from __future__ import annotations

import dataclasses

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.eval.suites.data import DataFolder, read_rows
from kvjax.eval.suites.item import Asked, Item, Suite
from kvjax.eval.suites.prompts import tokens_of

PLACES = ("mtbench/mtbench101.jsonl", "mtbench101.jsonl")
#: The benchmark's 13 abilities, by its own letters.
TASKS = ("CM", "SI", "AR", "TS", "CC", "CR", "FR", "SC", "SA", "MR", "GR", "IC", "PI")
#: Tokens of a reply that are scored.
REPLY_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class Round:
    """A user's message, and the reference reply."""

    user: str
    bot: str


@dataclasses.dataclass(frozen=True)
class Row:
    """A dialogue of one ability."""

    task: str
    id: int
    history: tuple[Round, ...]


def _read(data: DataFolder, asked: Asked) -> list[Row]:
    """The dialogues of the asked abilities."""
    path = data.need("MT-Bench-101", *PLACES)
    rows, numbers = read_rows(path, Row), dict[tuple[str, int], int]()
    for number, row in enumerate(rows, 1):
        if len(row.history) < 2 or not all(one.user.strip() and one.bot.strip() for one in row.history):
            raise UsageError(f"{path}, row {number} is no dialogue of two rounds or more.")
        if (first := numbers.setdefault((row.task, row.id), number)) != number:
            raise UsageError(f"{path}, row {number} has the task and id of row {first}; give it an id of its own.")
    found = [row for row in rows if row.task in asked.tasks]
    if not found:
        raise UsageError(f"{path} has no dialogue of {', '.join(asked.tasks)}.")
    return found


def _dialogue(lm: LanguageModel, row: Row) -> list[Item]:
    """An item for each round from the second on; the rounds before it are read as a chat's turns are."""
    chat = lm.tokenizer.has_chat_template
    said = [one.user if chat else f"USER: {one.user}\nASSISTANT:" for one in row.history]
    earlier = tuple((question, one.bot) for question, one in zip(said, row.history, strict=True))
    name, found = f"{row.task}/{row.id}", []
    for turn in range(1, len(said)):
        reply = lm.tokenizer.decode(lm.tokenizer.encode(row.history[turn].bot)[:REPLY_TOKENS])
        found.append(
            Item(
                id=f"{name}/{turn}",
                task=row.task,
                context="" if chat else "A dialogue between a user and an assistant.\n\n",
                question=said[turn],
                answers=("0",),
                metric="next tokens",
                max_new_tokens=0,
                groups=(f"turn {turn + 1}",),
                earlier=earlier[:turn],
                shares=name,
                choices=(reply if chat else f" {reply}",),
            )
        )
    return found


def _items(lm: LanguageModel, data: DataFolder, asked: Asked) -> list[Item]:
    most = min(asked.length or lm.config.max_position, lm.config.max_position)
    counts = dict.fromkeys(asked.tasks, 0)
    found: list[Item] = []
    for row in _read(data, asked):
        if asked.limit is not None and counts[row.task] >= asked.limit:
            continue
        dialogue = _dialogue(lm, row)
        if all(tokens_of(lm, item) <= most for item in dialogue):
            counts[row.task] += 1
            found += dialogue
    if not found:
        raise UsageError(f"No dialogue of {', '.join(asked.tasks)} is within {most} tokens.")
    return found


DIALOGUES = Suite(
    name="dialogues",
    title="MT-Bench-101: reference replies in dialogues of several rounds",
    tasks=TASKS,
    about=(
        f"Score: the fraction of a reference reply's first {REPLY_TOKENS} tokens that are the likeliest in their "
        "places under the cache of the rounds before; mean probability: 1 over the reply's perplexity. This is NOT the "
        "benchmark's metric, for which a large model judges replies; it compares caches with each other only. Every "
        "round is read and compressed as a chat's turn is. Dialogues that exceed the length are left out."
    ),
    items=_items,
    check=_read,
    limit=5,
    quick_limit=1,
)
