"""ROUGE-L as LongBench reports it (package ``rouge`` 1.0.1), and as SCBench does (``rouge_score`` 0.1.2)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence


def rouge_l(prediction: str, reference: str) -> float:
    """The F-measure of ROUGE-L over sentences cut at full stops; 0 where either text has no words.

    It counts different words: a sentence's longest common subsequence with each of the other text's sentences becomes
    a set of words, and so do both texts.
    """
    said, wanted = _sentences(prediction), _sentences(reference)
    if not said or not wanted:
        return 0.0
    found: set[str] = set()
    for sentence in wanted:
        for other in said:
            found.update(_common(sentence, other))
    recall = len(found) / len({word for sentence in wanted for word in sentence})
    precision = len(found) / len({word for sentence in said for word in sentence})
    return 2 * (precision * recall) / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    # A piece of white space alone is a sentence of one empty word.
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _common(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """A longest common subsequence; of several the one that the package finds."""
    table = _lengths(one, other)
    i, j, words = len(one), len(other), []
    while i and j:
        if one[i - 1] == other[j - 1]:
            words.append(one[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words[::-1]


def rouge_lsum(prediction: str, reference: str) -> float:
    """The F-measure of ``rouge_score``'s rougeLsum, without stemming: union LCS over sentences cut at line ends.

    Of each sentence of the reference the words count that a longest common subsequence with any of the answer's
    sentences holds, each at most as often as both texts have it.
    """
    said, wanted = _lines(prediction), _lines(reference)
    given, needed = (Counter(word for line in lines for word in line) for lines in (said, wanted))
    if not given or not needed:
        return 0.0
    left, right, hits = Counter(given), Counter(needed), 0
    for line in wanted:
        for place in sorted({place for other in said for place in _common_places(line, other)}):
            word = line[place]
            if left[word] > 0 and right[word] > 0:
                hits, left[word], right[word] = hits + 1, left[word] - 1, right[word] - 1
    precision, recall = hits / given.total(), hits / needed.total()
    return 2 * precision * recall / (precision + recall) if hits else 0.0


def _lines(text: str) -> list[list[str]]:
    """Words of letters a to z and digits, of each line that is not empty."""
    return [re.findall(r"[a-z0-9]+", line.lower()) for line in text.split("\n") if line]


def _common_places(one: Sequence[str], other: Sequence[str]) -> list[int]:
    """The places in ``one`` of a longest common subsequence; of several the one that the package finds."""
    table = _lengths(one, other)
    i, j, places = len(one), len(other), []
    while i and j:
        if one[i - 1] == other[j - 1]:
            places.append(i - 1)
            i, j = i - 1, j - 1
        elif table[i][j - 1] > table[i - 1][j]:
            j -= 1
        else:
            i -= 1
    return places


def _lengths(one: Sequence[str], other: Sequence[str]) -> list[list[int]]:
    """Lengths of longest common subsequences of every two beginnings."""
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, word in enumerate(one, 1):
        for j, another in enumerate(other, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if word == another else max(table[i - 1][j], table[i][j - 1])
    return table
