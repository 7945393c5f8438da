"""Oracles of SnapKV and SlimKV, from the papers' rules; several test modules ask them."""

from __future__ import annotations

import numpy as np
from support.choosing import ChoosingHead, best, pooled


class SnapHead(ChoosingHead):
    """Window mass of each query head, pooled, aggregated; the window's columns are dropped before pooling."""

    def __init__(self, *args, window=4, size=10, kernel=5, pooling="avg", group="mean", **place):
        super().__init__(*args, **place)
        self.window, self.size, self.kernel, self.pooling, self.group = window, size, kernel, pooling, group

    def budget(self, total: int) -> int:
        return self.size

    def choose(self, candidates, new, budget):
        prefix = len(candidates) - self.window
        mass = self.mass(candidates, new[-self.window :])[:, :prefix]
        by_head = np.stack([pooled(list(row), self.kernel, self.pooling) for row in mass])
        scores = {"mean": by_head.mean, "sum": by_head.sum, "max": by_head.max}[self.group](axis=0)
        return [candidates[i] for i in best(scores, budget - self.window)] + candidates[prefix:]


class SlimHead(ChoosingHead):
    """S1 over the group's heads and the window's queries [3], S2 the value's largest channel [4], S1 x S2 [5]."""

    def __init__(self, *args, window=4, size=10, score="both", pooling="avg", kernel=5, **place):
        super().__init__(*args, **place)
        self.window, self.size, self.score = window, size, score
        self.pooling, self.kernel = pooling, kernel

    def budget(self, total: int) -> int:
        return self.size

    def choose(self, candidates, new, budget):
        prefix = candidates[: -self.window]
        s1 = self.mass(candidates, new[-self.window :]).sum(axis=0)[: len(prefix)]
        s2 = np.array([max(abs(x) for x in self.v[t]) for t in prefix])
        s = {"both": s1 * s2, "s1": s1, "s2": s2}[self.score]
        scores = pooled(list(s), self.kernel, self.pooling)
        return [prefix[i] for i in best(scores, budget - self.window)] + candidates[-self.window :]
