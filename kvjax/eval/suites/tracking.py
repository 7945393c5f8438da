"""RULER's variable tracking: which names have a value, through a chain of assignments hidden in noise."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable

import numpy as np

from kvjax.eval.ruler import NOISE, Encoder, Sample
from kvjax.eval.suites.haystack_size import largest, too_short

HOPS = 4
MAX_NEW_TOKENS = 30
CONTEXT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
QUESTION = "Question: Find all variables that are assigned the value {query} in the text above."
ANSWER_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {query}, they are: "
)
#: Tokens of the worked example at most, and the value in it before it is drawn anew.
_EXAMPLE_TOKENS, _EXAMPLE_VALUE = 500, "12345"


class _Draw:
    """Draws chains in noise; names and values come from two generators, as the benchmark's do."""

    def __init__(self, seed: int):
        self._rng, self._values = random.Random(seed), np.random.RandomState(seed)

    def name(self, letters: int) -> str:
        return "".join(self._rng.choices(string.ascii_uppercase, k=letters))

    def value(self) -> str:
        return str(self._values.randint(10000, 99999))

    def sample(self, lines: int, example: bool) -> Sample:
        letters = 3 if example else 5
        names = [self.name(letters) for _ in range(HOPS + 1)]
        while len(set(names)) < HOPS + 1:
            names.append(self.name(letters))
        names = names[: HOPS + 1]
        value = _EXAMPLE_VALUE if example else self.value()
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
        text = [NOISE] * lines
        for number, place in enumerate(sorted(self._rng.sample(range(lines), len(chain)))):
            text.insert(place + number, chain[number])
        return Sample(
            index=0,
            context=CONTEXT.format(context="\n".join(text).replace(". \n", ".\n")),
            question=QUESTION.format(query=value),
            answer_prefix=ANSWER_PREFIX.format(query=value, count=HOPS + 1),
            outputs=tuple(names),
            length=0,
        )

    def renamed(self, example: str) -> str:
        """The worked example with new names and a new value."""
        for old in example.split()[-HOPS - 1 :]:
            example = example.replace(old, self.name(len(old)))
        return example.replace(_EXAMPLE_VALUE, self.value())


def tracking_samples(tokenizer: Encoder, length: int, samples: int, seed: int, template_tokens: int) -> list[Sample]:
    """Samples that begin with a worked example, and fill ``length`` tokens with their answer."""
    draw = _Draw(seed)

    def tokens(sample: Sample) -> int:
        return len(tokenizer.encode(sample.prompt))

    lines = _most_lines(lambda size: tokens(draw.sample(size, True)), 0, _EXAMPLE_TOKENS, 5)
    while tokens(first := draw.sample(lines, True)) > _EXAMPLE_TOKENS and lines > HOPS + 1:
        lines = max(lines - 5, HOPS + 1)
    example = f"{first.prompt} {' '.join(first.outputs)}\n"
    more = len(tokenizer.encode(example)) + MAX_NEW_TOKENS
    room, step = length - template_tokens, 5 if length < 4096 else 10
    lines = _most_lines(lambda size: tokens(draw.sample(size, False)), more, room, step)
    made = []
    for index in range(samples):
        used = lines
        while True:
            plain = draw.sample(used, False)
            context = f"{draw.renamed(example)}\n{plain.context}"
            sample = Sample(index, context, plain.question, plain.answer_prefix, plain.outputs, 0)
            count = tokens(sample) + MAX_NEW_TOKENS
            if count <= room:
                break
            if used <= step:
                raise too_short(length, "vt", count + template_tokens)
            used = max(used - step, HOPS + 1)
        made.append(Sample(index, context, plain.question, plain.answer_prefix, plain.outputs, count + template_tokens))
    return made


def _most_lines(tokens: Callable[[int], int], more: int, room: int, step: int) -> int:
    """The lines that fit beside ``more`` tokens; the first estimate is without them, as the benchmark's is."""
    per_line = tokens(step) / step
    return largest(lambda size: tokens(size) + more, room, step, max(int(room / per_line * 3), step * 2))
