"""The suite ``rounds``: LongEval's records of many rounds of a dialogue, of which the first topic is asked for."""

from __future__ import annotations

import dataclasses

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.eval.suites.data import DataFolder, read_rows
from kvjax.eval.suites.item import Asked, Item, Suite, limited
from kvjax.eval.suites.prompts import room_of

MAX_NEW_TOKENS = 50
COUNTS = (5, 10, 15, 20, 25, 30)
#: The end of every record; what follows is the question.
MARK = "Now the record ends."


@dataclasses.dataclass(frozen=True)
class Row:
    """A record with its question, and the topics in their order."""

    prompt: str
    topics: tuple[str, ...]


def _read(data: DataFolder, task: str) -> list[tuple[str, str, Row]]:
    """Context, question and row of each record of so many topics."""
    path = data.need(f"LongEval's file of {task}", f"longchat/{task}.jsonl", f"topics/testcases/{task}.jsonl")
    found = []
    for number, row in enumerate(read_rows(path, Row), 1):
        place = row.prompt.rfind(MARK)
        if place <= 0 or not row.topics:
            raise UsageError(f"{path}, row {number} is no record of topics that ends with {MARK!r}.")
        found.append((row.prompt[:place], row.prompt[place:], row))
    return found


def _items(lm: LanguageModel, data: DataFolder, asked: Asked) -> list[Item]:
    room = room_of(lm, asked.length, MAX_NEW_TOKENS)
    found = []
    for task in asked.tasks:
        for number, (context, question, row) in enumerate(_read(data, task)):
            # Without its beginning a record has another first topic: one that is too long is left out.
            if len(lm.tokenizer.encode(context + question)) <= room:
                found.append(
                    Item(
                        id=f"{task}/{number}",
                        task=task,
                        context=context,
                        question=question,
                        answers=(row.topics[0].lower().removeprefix("the ").strip(),),
                        metric="containment",
                        max_new_tokens=MAX_NEW_TOKENS,
                    )
                )
    if not found:
        most = asked.length or lm.config.max_position
        raise UsageError(f"No record of {', '.join(asked.tasks)} is within {most} tokens.")
    return limited(found, asked.limit)


ROUNDS = Suite(
    name="rounds",
    title="LongEval: the first topic of a dialogue of many rounds",
    tasks=tuple(f"topics_{count}" for count in COUNTS),
    about=(
        "Score: the fraction of answers that contain the first topic's name once both are normalised; the benchmark "
        "has a model judge what means the same. Records that exceed the length are left out, since without its "
        "beginning one has another first topic."
    ),
    items=_items,
    check=lambda data, asked: [_read(data, task) for task in asked.tasks],
    limit=10,
    quick_length=None,
    quick_limit=1,
)
