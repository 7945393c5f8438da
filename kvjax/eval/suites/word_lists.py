"""RULER's aggregation tasks: the most common words of a list, the most frequent coded words of a text."""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.special import zeta

from kvjax.errors import KvjaxError, UsageError, missing_extra
from kvjax.eval.ruler import Encoder, Sample
from kvjax.eval.suites.data import read_json
from kvjax.eval.suites.haystack_size import largest, too_short

ENGLISH_WORDS = "ruler/english_words.json"
COMMON_TOKENS, FREQUENT_TOKENS = 120, 50
_COMMON = 10
_ALPHA, _LETTERS = 2.0, 6

COMMON_CONTEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\n"
)
COMMON_QUESTION = "Question: What are the 10 most common words in the above list?"
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
FREQUENT_CONTEXT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\n"
)
FREQUENT_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?"
)
FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"


@functools.cache
def _words(seed: int) -> list[str]:
    """Nouns, adjectives and verbs of the ``wonderwords`` package, shuffled."""
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        raise KvjaxError(missing_extra("RULER's words come from the package wonderwords", "eval")) from error
    lists = RandomWord()
    found = {word for kind in ("noun", "adjective", "verb") for word in lists.filter(include_categories=[kind])}
    words = sorted(found)
    random.Random(seed).shuffle(words)
    return words


@functools.lru_cache(maxsize=1)
def _more_words(path: Path | None, count: int) -> list[str]:
    """A list of English words, for lists that are longer than the package's."""
    if path is None:
        raise UsageError(
            f"The task cwe needs {count} different words at this length; give --data DIR with {ENGLISH_WORDS}."
        )
    found = read_json(path)
    if not isinstance(found, dict) or not all(isinstance(word, str) for word in found.values()):
        raise UsageError(f"{path} is no JSON object of words.")
    return list(found.values())


def common_samples(
    tokenizer: Encoder, length: int, samples: int, seed: int, template_tokens: int, more: Path | None
) -> list[Sample]:
    """Lists of words in which ten are repeated more often than the others; a worked example stands before each."""
    rng, words = random.Random(seed), _words(seed)
    shown, asked = ((20, 3, 1), (6, 1)) if length < 4096 else ((40, 10, 3), (30, 3))

    def listing(count: int, common: int, others: int) -> tuple[str, list[str]]:
        drawn = rng.sample(words if count <= len(words) else _more_words(more, count), count)
        repeated = drawn[:_COMMON] * common + drawn[_COMMON:] * others
        random.Random(seed).shuffle(repeated)
        return _numbered(repeated), drawn[:_COMMON]

    def draw(count: int) -> Sample:
        example, answer = listing(*shown)
        text, outputs = listing(count, *asked)
        opening = f"{COMMON_CONTEXT.format(context=example)}{COMMON_QUESTION}{COMMON_PREFIX} {_numbered(answer)}\n"
        context = opening + COMMON_CONTEXT.format(context=text)
        return Sample(0, context, COMMON_QUESTION, COMMON_PREFIX, tuple(outputs), 0)

    def tokens(sample: Sample) -> int:
        return len(tokenizer.encode(sample.prompt)) + COMMON_TOKENS

    room, step = length - template_tokens, _COMMON
    per_word = (tokens(draw(4096)) - COMMON_TOKENS) / 4096
    count = largest(lambda size: tokens(draw(size)), room, step, max(int(room // per_word) * 2, step * 2))
    made = []
    for index in range(samples):
        used = count
        while (cost := tokens(sample := draw(used))) > room:
            if used <= step:
                raise too_short(length, "cwe", cost + template_tokens)
            used = max(used - step, _COMMON)
        made.append(
            Sample(index, sample.context, sample.question, sample.answer_prefix, sample.outputs, cost + template_tokens)
        )
    return made


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def frequent_samples(tokenizer: Encoder, length: int, samples: int, seed: int, template_tokens: int) -> list[Sample]:
    """Texts of coded words whose frequencies fall off as a power; the most frequent of all is dots, which are noise."""
    rng = random.Random(seed)
    room = length - template_tokens - FREQUENT_TOKENS
    step, size = room // 32, room // 50
    if step < 1 or size < 4:
        raise too_short(length, "fwe")

    def vocabulary() -> list[str]:
        found = [_code(rng) for _ in range(size)]
        while len(set(found)) < size:
            found.append(_code(rng))
        words = sorted(set(found))
        random.Random(seed).shuffle(words)
        return ["...", *words[1:]]

    def draw(words: list[str], count: int) -> Sample:
        ranks = np.arange(1, len(words) + 1)
        times = (count * (ranks**-_ALPHA) / zeta(_ALPHA)).astype(int)
        drawn = [word for word, repeats in zip(words, times, strict=True) for _ in range(repeats)]
        random.Random(seed).shuffle(drawn)
        context = FREQUENT_CONTEXT.format(context=" ".join(drawn))
        return Sample(0, context, FREQUENT_QUESTION, FREQUENT_PREFIX, tuple(words[1:4]), 0)

    def tokens(sample: Sample) -> int:
        return len(tokenizer.encode(sample.prompt))

    words, count = vocabulary(), room // _LETTERS
    while tokens(draw(words, count)) < room:
        count += step
    count -= step
    made = []
    for index in range(samples):
        words, used = vocabulary(), count
        while (cost := tokens(sample := draw(words, used))) > room:
            used -= step
            if used < 1:
                raise too_short(length, "fwe")
        cost += FREQUENT_TOKENS + template_tokens
        made.append(Sample(index, sample.context, sample.question, sample.answer_prefix, sample.outputs, cost))
    return made


def _code(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=_LETTERS))
