"""Per-step eviction in NumPy, one KV head at a time, in float64.

Shares nothing with the product. Tokens are numbers; what a head holds is a list of them by position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

#: The product's float32 may rank two tokens the other way round when their scores differ by less than this share.
NARROW = 2e-5


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attention(q: np.ndarray, k: np.ndarray, queries: list[int], keys: list[int], scale: float) -> np.ndarray:
    """[G, queries, keys] causal attention over the tokens in ``keys``: softmax(scale * q.k), by their numbers."""
    scores = scale * np.einsum("gqd,kd->gqk", q[:, queries].astype(np.float64), k[keys].astype(np.float64))
    seen = np.asarray(keys) <= np.asarray(queries)[:, None]
    return softmax(np.where(seen, scores, -np.inf))


def lowest(scores: dict[int, float], among: list[int], margins: list[float]) -> int:
    """The token with the least score, the earlier among equals; notes how near the runner-up came."""
    first, *rest = sorted(among, key=lambda t: (scores[t], t))
    if rest:
        margins.append((scores[rest[0]] - scores[first]) / max(abs(scores[rest[0]]), 1e-30))
    return first


@dataclasses.dataclass
class HeadOracle:
    """One KV head: ``q`` [G, T, D], ``k`` and ``v`` [T, D] are its row's own tokens, without padding.

    ``start(oracle, candidates, new)`` gives the prompt's scores and those the accumulator starts with, ``scale(oracle,
    total)`` the factor of q.k in the increments.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    size: Callable[[int], int]
    recent: Callable[[int], int]
    start: Callable[[HeadOracle, list[int], list[int]], tuple[dict[int, float], dict[int, float]]]
    scale: Callable[[int, int], float] = lambda total, budget: 0.0

    def __post_init__(self) -> None:
        self.held: list[int] = []
        self.scores: dict[int, float] = {}
        self.seen, self.budget, self.equal, self.factor = 0, 0, 0, 0.0
        self.margins = [1.0]

    def read(self, count: int) -> tuple[list[int], dict[int, float]]:
        """The candidates of a prompt, or of a later turn, and their scores."""
        new = list(range(self.seen, self.seen + count))
        self.seen += count
        self.budget = self.equal = self.size(self.seen)
        self.factor = self.scale(self.seen, self.budget) or self.q.shape[-1] ** -0.5
        candidates = self.held + new
        ranking, self.scores = self.start(self, candidates, new)
        return candidates, ranking

    def turn(self, count: int) -> None:
        """Read a prompt, or a later turn."""
        candidates, ranking = self.read(count)
        while len(candidates) > self.budget:
            # One at a time is the same as the top of them, and shows the margin of the last choice.
            free = candidates[: len(candidates) - self.recent(self.budget)] or candidates
            candidates = [t for t in candidates if t != lowest(ranking, free, self.margins)]
        self.held = candidates

    def step(self) -> None:
        """Decode one token: it attends to what is held and to itself, then one token may leave."""
        token, self.seen = self.seen, self.seen + 1
        self.held = self.held + [token]
        self.scores[token] = 0.0
        weights = attention(self.q, self.k, [token], self.held, self.factor).sum(axis=(0, 1))
        for t, weight in zip(self.held, weights, strict=True):
            self.scores[t] += weight
        if len(self.held) > self.budget:
            free = [t for t in self.held if t <= token - self.recent(self.equal)]
            self.held.remove(lowest(self.scores, free, self.margins))


@dataclasses.dataclass
class RowOracle:
    """One row: a :class:`HeadOracle` for each of its KV heads, all doing the same."""

    heads: list[HeadOracle]

    def turn(self, count: int) -> None:
        for head in self.heads:
            head.turn(count)

    def step(self) -> None:
        for head in self.heads:
            head.step()

    @property
    def held(self) -> list[list[int]]:
        return [head.held for head in self.heads]

    @property
    def margin(self) -> float:
        """How narrowly the narrowest choice so far was made."""
        return min(min(head.margins) for head in self.heads)


@dataclasses.dataclass
class SharedRow(RowOracle):
    """A row whose heads share a budget (Ada-KV, algorithm 1), and drop a token at each step within what they got."""

    floor: float = 0.2

    def turn(self, count: int) -> None:
        if count == 0:
            return
        read = [head.read(count) for head in self.heads]
        total = len(read) * self.heads[0].equal
        kept = [candidates for candidates, _ in read]
        if sum(map(len, kept)) > total:
            kept = self._divided(read, total)
        more = (total - sum(map(len, kept))) // len(kept)
        for head, own in zip(self.heads, kept, strict=True):
            head.held, head.budget = own, len(own) + more

    def _divided(self, read: list[tuple[list[int], dict[int, float]]], total: int) -> list[list[int]]:
        """Each head's recent tokens, its own best up to the floor, and the best of all heads."""
        equal, kept, others = self.heads[0].equal, [], []
        for i, (head, (candidates, ranking)) in enumerate(zip(self.heads, read, strict=True)):
            first = max(len(candidates) - head.recent(equal), 0)
            best = sorted(((ranking[t], t) for t in candidates[:first]), reverse=True)
            own = max(max(int(self.floor * equal + 1e-9), 1) - (len(candidates) - first), 0)
            self._note([score for score, _ in best], own)
            kept.append(candidates[first:] + [t for _, t in best[:own]])
            others += [(score, i, t) for score, t in best[own:]]
        others.sort(reverse=True)
        left = total - sum(map(len, kept))
        self._note([score for score, _, _ in others], left)
        for _, i, t in others[:left]:
            kept[i].append(t)
        return [sorted(own) for own in kept]

    def _note(self, scores: list[float], count: int) -> None:
        """Note how near the best one that leaves came to the last that stays."""
        if 0 < count < len(scores):
            last, beyond = scores[count - 1 : count + 1]
            self.heads[0].margins.append((last - beyond) / max(abs(last), 1e-30))


def sizes(policy: Any) -> Callable[[int], int]:
    """What ``budget`` and ``ratio`` promise."""
    if policy.ratio is None:
        return lambda total: policy.budget
    return lambda total: max(int(policy.ratio * total + 1e-9), policy.smallest())
