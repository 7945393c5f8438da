"""Contexts of SCBench's synthetic tasks, drawn at any length; the benchmark's own have more than 20,000 tokens."""

from __future__ import annotations

import itertools
import json
import random
import string
import uuid
from collections.abc import Callable, Sequence

from kvjax.eval.ruler import NOISE

HOPS = 4
_TRACK = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
_ORDER = ("largest", "smallest", "second largest", "second smallest", "third largest")

#: A context, and its questions with their answers.
Drawn = tuple[str, Sequence[tuple[str, str | list[str]]]]


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def key_values(rng: random.Random, size: int, turns: int) -> Drawn:
    """An object of ``size`` random keys and values; each question asks for the value of a key."""
    held = {_uuid(rng): _uuid(rng) for _ in range(size)}
    asked = [
        (f'Key: "{key}"\nThe value associated with the specified key is: ', held[key])
        for key in rng.sample(sorted(held), turns)
    ]
    return f"JSON data:\n{json.dumps(held)}", asked


def _letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=count))


def prefix_suffix(rng: random.Random, size: int, turns: int) -> Drawn:
    """``size`` random words; a question gives the beginning and the end of one, which others have too, but not both."""
    groups, asked = [], []
    for _ in range(turns):
        start, end = _letters(rng, 3), _letters(rng, 3)
        word = start + _letters(rng, 10) + end
        groups += [word, start + _letters(rng, 13), _letters(rng, 13) + end]
        asked.append((f"Prefix: {start}; Suffix: {end}. The word with both prefix and suffix from the dict is: ", word))
    words = groups + [_letters(rng, 16) for _ in range(size - len(groups))]
    rng.shuffle(words)
    return f"Dictionary = [{', '.join(words)}]", asked


def variables(rng: random.Random, size: int, turns: int) -> Drawn:
    """A chain of assignments for each question in ``size`` lines of noise: which names have its value?"""
    names = rng.sample(list(map("".join, itertools.product(string.ascii_uppercase, repeat=3))), turns * (HOPS + 1))
    values = rng.sample(range(10000, 100000), turns)
    lines, asked = [NOISE] * size, []
    for turn, value in enumerate(values):
        chain = names[turn * (HOPS + 1) : (turn + 1) * (HOPS + 1)]
        written = [f"VAR {chain[0]} = {value}", *(f"VAR {new} = VAR {old}" for old, new in itertools.pairwise(chain))]
        for number, place in enumerate(sorted(rng.sample(range(len(lines)), len(written)))):
            lines.insert(place + number, written[number])
        question = (
            f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to "
            f"the chain(s) of variable assignment in the text above, {HOPS + 1} variables are assigned the value "
            f"{value}, they are: "
        )
        asked.append((question, chain))
    return _TRACK + "\n".join(lines), asked


def numbers(rng: random.Random, size: int, turns: int) -> Drawn:
    """``size`` different whole numbers; a question asks for one by its place in their order."""
    held = rng.sample(range(10 * size + 100), size)
    ordered = sorted(held)
    found = dict(zip(_ORDER, (ordered[-1], ordered[0], ordered[-2], ordered[1], ordered[-3]), strict=True))
    asked: list[tuple[str, str | list[str]]] = [
        (
            f"You should answer with only one number, no other words. The {name} number of the list is: ",
            str(found[name]),
        )
        for name in _ORDER[:turns]
    ]
    return str(held), asked


#: Fewest lines, words or numbers of any context.
LEAST = 5
#: Of each synthetic task how a context of some size is drawn, and the size that each question takes at least.
DRAWS: dict[str, tuple[Callable[[random.Random, int, int], Drawn], int]] = {
    "kv": (key_values, 1),
    "prefix_suffix": (prefix_suffix, 3),
    "vt": (variables, 1),
    "mf": (numbers, 1),
}
