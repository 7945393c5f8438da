"""ROUGE-L as the package ``rouge`` 1.0.1 computes it, which is what LongBench reports."""

from __future__ import annotations

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
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, word in enumerate(one, 1):
        for j, another in enumerate(other, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if word == another else max(table[i - 1][j], table[i][j - 1])
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
