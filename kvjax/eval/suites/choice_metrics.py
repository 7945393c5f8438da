"""Metrics of continuations that were scored and not generated; the answer is what the journal keeps of them as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any


def _read(answer: str) -> list[dict[str, Any]]:
    return json.loads(answer)


def likeliest(answer: str, right: Sequence[str]) -> float:
    """1 where the likeliest choice is a right one; of equal ones the first counts."""
    values = [found["logprob"] for found in _read(answer)]
    return float(str(values.index(max(values))) in right)


def likeliest_by_length(answer: str, right: Sequence[str], characters: Sequence[int]) -> float:
    """The same of log-probabilities over the choices' characters, which favour no short one."""
    values = [found["logprob"] / max(size, 1) for found, size in zip(_read(answer), characters, strict=True)]
    return float(str(values.index(max(values))) in right)


def next_tokens(answer: str) -> float:
    """The fraction of the first continuation's tokens that are the likeliest in their places."""
    found = _read(answer)[0]
    return found["likeliest"] / found["tokens"]


def mean_probability(answer: str) -> float:
    """The geometric mean of the probabilities of the first continuation's tokens: 1 over its perplexity."""
    found = _read(answer)[0]
    return math.exp(found["logprob"] / found["tokens"])
