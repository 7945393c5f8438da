"""BLEU of one text against one reference, smoothed as ``nltk``'s method 4 smooths it, which is what RepoQA reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

#: The constant of the smoothing (Chen & Cherry 2014), as nltk has it.
_K = 5
_ORDERS = 4


def bleu(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """The geometric mean of the precisions of one to four words in a row, times the penalty for brevity."""
    matches = [_matches(prediction, reference, order) for order in range(1, _ORDERS + 1)]
    if not matches[0][0]:
        return 0.0
    logs, missing, length = [], 0, len(prediction)
    for found, count in matches:
        if not found and length > 1:
            missing += 1
            logs.append(math.log(1 / (2**missing * _K / math.log(length)) / count))
        elif found:
            logs.append(math.log(found / count))
    brevity = 1.0 if length > len(reference) else math.exp(1 - len(reference) / length)
    return brevity * math.exp(math.fsum(logs) / _ORDERS)


def _matches(prediction: Sequence[str], reference: Sequence[str], order: int) -> tuple[int, int]:
    """Words in a row that both texts have, and those of the prediction (at least 1)."""
    said, wanted = (Counter(zip(*(text[i:] for i in range(order)), strict=False)) for text in (prediction, reference))
    return (said & wanted).total(), max(said.total(), 1)
