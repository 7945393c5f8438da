"""The suite ``longmemeval``: questions about many chats (Wu et al. 2024, arXiv:2410.10813), by type of question."""

from __future__ import annotations

from collections import Counter

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.eval.suites.data import DataFolder
from kvjax.eval.suites.item import Asked, Item, Suite
from kvjax.eval.suites.longmemeval_files import TYPES, read_questions
from kvjax.eval.suites.prompts import room_of


def _items(lm: LanguageModel, data: DataFolder, asked: Asked) -> list[Item]:
    encode, decode = lm.tokenizer.encode, lm.tokenizer.decode
    found, counts = [], Counter[str]()
    for one in sorted(read_questions(data), key=lambda one: TYPES.index(one.type)):
        enough = asked.limit is not None and counts[one.type] >= asked.limit
        if one.type not in asked.tasks or enough:
            continue
        counts[one.type] += 1
        room = room_of(lm, asked.length, one.max_new_tokens) - len(encode(one.head)) - len(encode(one.question)) - 4
        if room < 1:
            raise UsageError(f"The length leaves no room for the chats of {one.id}.")
        text = one.history()
        ids = encode(text)
        while len(ids) > room:  # the benchmark keeps the first tokens; as text they may be more than they were
            text = decode(ids[: room - 1])
            ids = encode(text)
        found.append(
            Item(
                id=one.id,
                task=one.type,
                context=one.head + text,
                question=one.question,
                answers=(one.answer,),
                metric="containment",
                max_new_tokens=one.max_new_tokens,
            )
        )
    return found


LONGMEMEVAL = Suite(
    name="longmemeval",
    title="LongMemEval by type of question: a proxy without a judge",
    tasks=TYPES,
    about=(
        "Score: the fraction of answers that contain the reference once both are normalised. This is NOT the "
        "benchmark's metric, for which a large model judges each answer; it compares caches with each other only. "
        "Preferences and questions that cannot be answered need the judge, and are left out. Chats beyond "
        "the length are left out from the end, as in the benchmark."
    ),
    items=_items,
    check=lambda data, asked: read_questions(data),
    limit=10,
)
