"""The suite ``passkey``: a key of 64 digits at each depth of backgrounds of each length."""

from __future__ import annotations

import random
import re

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.eval.needle_prompts import template_tokens
from kvjax.eval.suites.data import DataFolder
from kvjax.eval.suites.essays import cycled, essay_text, need_essays
from kvjax.eval.suites.haystack_size import largest
from kvjax.eval.suites.item import Asked, Item, Suite
from kvjax.eval.suites.prompts import tokens_of

MAX_NEW_TOKENS = 256
DIGITS = 64
#: Words of the shortest and the longest background.
SHORTEST, LONGEST = 512, 20480
INSTRUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you about "
    "the important information there.\n"
)
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "\nWhat is the pass key? The pass key is "
_WORD = re.compile(r"\S+\s*")


def spaced(least: int, most: int, count: int) -> list[int]:
    """Whole numbers at equal distances, the ends among them."""
    if count == 1 or least == most:
        return [most]
    return [least, *(int(least + i * (most - least) / (count - 1)) for i in range(1, count - 1)), most]


def hidden(words: list[str], depth: float, needle: str) -> str:
    """The words with a needle before the word at ``depth`` (0 to 1) of them."""
    place = int(len(words) * depth)
    return " ".join(("".join(words[:place]).strip(), needle, "".join(words[place:]).strip(), ""))


def _items(lm: LanguageModel, data: DataFolder, asked: Asked) -> list[Item]:
    words = _WORD.findall(essay_text(need_essays(data, "hide the pass key")))
    rng = random.Random(asked.seed)
    room = min(lm.config.max_position, asked.length or lm.config.max_position) - template_tokens(lm) - MAX_NEW_TOKENS

    def item(count: int, depth: float, sample: int) -> Item:
        key = "".join(rng.choice("0123456789") for _ in range(DIGITS))
        text = hidden(cycled(words, count), depth, NEEDLE.format(key=key))
        return Item(
            id=f"passkey/{count}/{depth:.4f}/{sample}",
            task="passkey",
            context=INSTRUCTION + text,
            question=QUESTION,
            answers=(key,),
            metric="partial match",
            max_new_tokens=MAX_NEW_TOKENS,
            cell=(count, round(100 * depth, 1)),
        )

    def tokens(count: int) -> int:
        one = item(count, 0.5, 0)
        return len(lm.tokenizer.encode(one.context + one.question))

    def grid(most: int) -> list[Item]:
        least = min(SHORTEST, max(most // 4, 8))
        lengths, depths = (2, 3) if asked.quick else (10, 10)
        return [
            item(count, place / (depths - 1), sample)
            for count in spaced(least, most, lengths)
            for place in range(depths)
            for sample in range(asked.limit or 1)
        ]

    def fits(items: list[Item]) -> bool:
        longest = [one for one in items if one.cell and one.cell[0] == most]
        if any(len(lm.tokenizer.encode(one.context + one.question)) > room for one in longest):
            return False
        return all(tokens_of(lm, one) <= lm.config.max_position for one in longest)  # as they are read, in two parts

    most = largest(tokens, room, 16, LONGEST)
    while most >= 16:
        rng = random.Random(asked.seed)
        items = grid(most)
        if fits(items):  # keys and places take a few tokens more or fewer than the search's
            return items
        most -= 8
    most = min(asked.length or lm.config.max_position, lm.config.max_position)
    raise UsageError(f"{most} tokens are too few for a pass key with its answer.")


PASSKEY = Suite(
    name="passkey",
    title="Pass keys of 64 digits by length and depth",
    tasks=("passkey",),
    about=(
        "Score: the longest run of the key's digits in the answer, over 64 (partial match); exact match: answers "
        "that contain the whole key. Lengths are words of essays, at equal distances from 512 to 20,480 or the most "
        "that fit."
    ),
    items=_items,
    check=lambda data, asked: essay_text(need_essays(data, "hide the pass key")),
    length=2560,
    limit=1,
    quick_limit=1,
    heat_map=True,
)
