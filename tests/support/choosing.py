"""Oracles of policies that choose tokens by attention: one KV head at a time, tokens by number, float64, no JAX.

Also the harness that leads a policy and its oracle through the same prompts, turns and decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import assume
from support.driver import Driver, config_for, random_kv


def best(scores: np.ndarray, count: int) -> list[int]:
    """Indices of the highest scores, later first among equals, in order of position.

    A choice between scores that differ by less than float32 tells apart is no example: drawn ones are drawn again, and
    fixed ones fail.
    """
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], -i))
    if 0 < count < len(order):
        last, next_best = scores[order[count - 1]], scores[order[count]]
        if 0 < last - next_best <= 1e-6 * np.abs(last):
            assume(False)
    return sorted(order[:count])


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


class ChoosingHead:
    """One KV head: its G query heads, its tokens, and which of them are kept. Subclasses say what is chosen."""

    def __init__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, row: int = 0, head: int = 0):
        self.q, self.k, self.v = (x.astype(np.float64) for x in (q, k, v))  # [G, T, D], [T, D], [T, D]
        self.row, self.head = row, head
        self.kept: list[int] = []
        self.seen = 0

    def budget(self, total: int) -> int:
        raise NotImplementedError

    def choose(self, candidates: list[int], new: list[int], budget: int) -> list[int]:
        """The tokens that stay, in order."""
        raise NotImplementedError

    def noted(self, new: list[int]) -> None:
        """What is remembered of a turn's queries, before choosing."""

    def read(self, count: int) -> None:
        new = list(range(self.seen, self.seen + count))
        candidates = self.kept + new
        self.seen += count
        self.noted(new)
        budget = self.budget(self.seen)
        fits = len(candidates) <= budget or not new
        self.kept = candidates if fits else self.choose(candidates, new, budget)

    def decode(self, count: int) -> None:
        self.kept += range(self.seen, self.seen + count)
        self.seen += count

    def mass(self, candidates: list[int], queries: list[int], scale: float | None = None) -> np.ndarray:
        """[G, candidates]: attention of these queries, each over the candidates up to itself, summed over them."""
        scale = self.k.shape[1] ** -0.5 if scale is None else scale
        total = np.zeros((len(self.q), len(candidates)))
        for t in queries:
            visible = [i for i, c in enumerate(candidates) if c <= t]
            for g, q in enumerate(self.q):
                total[g, visible] += softmax(self.k[[candidates[i] for i in visible]] @ q[t] * scale)
        return total


def pooled(scores: Sequence[float], kernel: int, pooling: str) -> np.ndarray:
    """1-d pooling of stride 1 and the same length; an average counts zeros beyond the ends."""
    result = []
    for i in range(len(scores)):
        around = scores[max(i - kernel // 2, 0) : i + kernel // 2 + 1]
        result.append(max(around) if pooling == "max" else sum(around) / kernel)
    return np.array(result)


#: What happens to a batch: ("read", tokens of each row) or ("decode", steps).
Event = tuple[str, Any]
MakeHead = Callable[..., ChoosingHead]


class Lane:
    """A batch's random keys, values and queries, read by a policy in the order of its rows' own tokens."""

    def __init__(self, policy: Any, batch: int, heads: int, group: int, dim: int, tokens: int, seed: int, **place: Any):
        self.k, self.v = random_kv(seed, batch, heads, tokens, dim)
        rng = np.random.default_rng(seed + 1)
        self.q = 1.5 * rng.standard_normal((batch, heads, group, tokens, dim)).astype(np.float32)
        layer = place.pop("layer", 0)
        config = config_for(heads, dim, place.pop("layers", layer + 1), num_heads=heads * group, **place)
        room = -(-tokens // 128) * 128  # few shapes to compile
        self.driver = Driver(policy, config, batch, prompt_capacity=room, new_capacity=room, layer=layer)

    def _next(self, x: np.ndarray, width: int) -> np.ndarray:
        """The next ``width`` tokens of every row, along the second axis from the end."""
        padded = np.concatenate([x, np.zeros_like(x[..., :width, :])], axis=-2)
        return np.stack([padded[b, ..., s : s + width, :] for b, s in enumerate(self.driver.seen)])

    def play(self, events: Sequence[Event]) -> Lane:
        for kind, amount in events:
            if kind == "read":
                width = max(int(max(amount)), 1)
                k, v, q = (self._next(x, width) for x in (self.k, self.v, self.q))
                self.driver.read(k, v, amount, q=q)
            else:
                k, v, q = (self._next(x, amount) for x in (self.k, self.v, self.q))
                self.driver.decode(k, v, q=q)
        return self


def assert_same(
    policy: Any,
    make: MakeHead,
    events: Sequence[Event],
    *,
    heads: int,
    group: int,
    dim: int = 4,
    seed: int = 0,
    **place: Any,
) -> None:
    """A policy keeps exactly the tokens its oracle keeps, in every row and head, in order of position."""
    batch = len(next(amount for kind, amount in events if kind == "read"))
    tokens = sum(int(max(amount)) if kind == "read" else amount for kind, amount in events)
    lane = Lane(policy, batch, heads, group, dim, tokens, seed, **place).play(events)
    for row in range(batch):
        kept = lane.driver.kept(lane.k, row)
        for head in range(heads):
            oracle = make(lane.q[row, head], lane.k[row, head], lane.v[row, head], row=row, head=head)
            for kind, amount in events:
                oracle.read(int(amount[row])) if kind == "read" else oracle.decode(amount)
            assert kept[head] == oracle.kept, (row, head)


def assert_alone(
    policy: Any, events: Sequence[Event], *, heads: int = 2, group: int = 2, dim: int = 4, seed: int = 0
) -> None:
    """Each row of a batch keeps what it keeps as a batch of one."""
    batch = len(next(amount for kind, amount in events if kind == "read"))
    tokens = sum(int(max(amount)) if kind == "read" else amount for kind, amount in events)
    lane = Lane(policy, batch, heads, group, dim, tokens, seed).play(events)
    for row in range(batch):
        alone = Lane(policy, 1, heads, group, dim, tokens, seed)
        alone.k, alone.v, alone.q = lane.k[row : row + 1], lane.v[row : row + 1], lane.q[row : row + 1]
        alone.play([(kind, amount[row : row + 1] if kind == "read" else amount) for kind, amount in events])
        assert alone.driver.kept(alone.k, 0) == lane.driver.kept(lane.k, row), row
