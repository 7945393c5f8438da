"""Haystacks, and the share of them that a policy's cache answers."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
from support.recall import task

import kvjax

FOLDER = pathlib.Path(__file__).parents[2] / "golden" / "recall"
LENGTH, PAIRS, TAIL = 480, 8, 96
#: Recent tokens of the bounded caches: far fewer than lie between the last pair and a question.
WINDOW = 48

Haystacks = tuple[list[list[int]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Recall:
    """Shares of the questions whose first value, and whose both values, were right; and of slots that were kept."""

    first: float
    both: float
    share: float


def make_haystacks() -> Haystacks:
    """Eight prompts with eight pairs each, and the pairs [8, 8, 3]."""
    made = [task.haystack(np.random.RandomState(seed), LENGTH, PAIRS, TAIL) for seed in range(8)]
    return [tokens.tolist() for tokens, _ in made], np.stack([pairs for _, pairs in made])


def recall(lm: Any, haystacks: Haystacks, policy: Any) -> Recall:
    """Read and compress the haystacks, then ask each for every key: nobody knows the question while compressing."""
    prompts, pairs = haystacks
    read = kvjax.generate(lm, prompts, policy=policy, max_new_tokens=0)
    caches = [output.cache for output in read for _ in range(PAIRS)]
    asked = pairs.reshape(-1, task.PAIR)
    answers = kvjax.generate(lm, asked[:, :1].tolist(), cache=caches, max_new_tokens=task.PAIR - 1)
    right = np.array([answer.tokens for answer in answers]) == asked[:, 1:]
    return Recall(right[:, 0].mean(), right.all(1).mean(), np.mean(read[0].stats.retained) / LENGTH)
