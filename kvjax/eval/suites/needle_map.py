"""The suite ``needle-map``: one sentence in essays at each depth of each length, as kvpress tests it."""

from __future__ import annotations

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.eval.needle_prompts import template_tokens
from kvjax.eval.suites.data import DataFolder
from kvjax.eval.suites.essays import essay_text, need_essays
from kvjax.eval.suites.item import Asked, Item, Suite
from kvjax.eval.suites.passkey import spaced
from kvjax.text.tokenizer import Tokenizer

MAX_NEW_TOKENS = 50
WRAPPER = "This is a very long story book: <book> {text} </book>.\n"
NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
QUESTION = "Based on the content of the book, what is the best thing to do in San Francisco?"
ANSWER_PREFIX = " The best thing to do in San Francisco is"
#: The answer as the prefix leaves it to be given.
ANSWER = NEEDLE.removeprefix(ANSWER_PREFIX.strip()).strip()


def needle_context(tokenizer: Tokenizer, text_ids: list[int], room: int, depth: float) -> str:
    """The essays' first tokens, as many as leave the whole within ``room``, with the needle at ``depth`` percent."""
    needle, count = tokenizer.encode(f" {NEEDLE}"), room
    while True:
        held = (text_ids * -(-count // len(text_ids)))[:count]
        place = int(count * depth / 100)
        text = WRAPPER.format(text=tokenizer.decode([*held[:place], *needle, *held[place:]]))
        over = len(tokenizer.encode(text)) - room
        if over <= 0:
            return text
        count -= over


def _check(data: DataFolder, asked: Asked) -> None:
    essay_text(need_essays(data, "hide the needle"))
    if asked.limit is not None:
        raise UsageError("--limit has nothing to limit in needle-map, which asks one question a cell; leave it out.")


def _items(lm: LanguageModel, data: DataFolder, asked: Asked) -> list[Item]:
    tokenizer = lm.tokenizer
    most = min(asked.length or lm.config.max_position, lm.config.max_position)
    reserved = template_tokens(lm) + len(tokenizer.encode(QUESTION + ANSWER_PREFIX)) + MAX_NEW_TOKENS + 2
    least = reserved + 2 * len(tokenizer.encode(WRAPPER + NEEDLE))
    if most < least:
        raise UsageError(f"{most} tokens are too few for a needle with its answer; give --length of at least {least}.")
    ids = tokenizer.encode(essay_text(need_essays(data, "hide the needle"))[: 8 * most])
    lengths, depths = (2, 3) if asked.quick else (8, 11)
    return [
        Item(
            id=f"needle-map/{length}/{depth}",
            task="needle",
            context=needle_context(tokenizer, ids, length - reserved, depth),
            question=QUESTION,
            answer_prefix=ANSWER_PREFIX,
            answers=(ANSWER,),
            metric="ROUGE-L",
            max_new_tokens=MAX_NEW_TOKENS,
            cell=(length, depth),
        )
        for length in dict.fromkeys(spaced(max(least, most // lengths), most, lengths))
        for depth in spaced(0, 100, depths)
    ]


NEEDLE_MAP = Suite(
    name="needle-map",
    title="A sentence found again, by length and depth",
    tasks=("needle",),
    about=(
        "Score: the F-measure of ROUGE-L between the answer and the end of the hidden sentence, which the answer's "
        "given beginning leaves to say. Lengths are tokens; depths are percent of the essays before the sentence."
    ),
    items=_items,
    check=_check,
    length=4096,
    quick_limit=None,
    heat_map=True,
)
