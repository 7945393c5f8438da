"""LagKV transcribed from the paper in NumPy, one head at a time; no code shared with the product."""

from __future__ import annotations

import numpy as np


def score(part: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """[7-10] in float64."""
    part, reference = part.astype(np.float64), reference.astype(np.float64)
    low, high = reference.min(axis=0), reference.max(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        normal = (part - low) / (high - low)
    normal[:, high == low] = 0.0
    deviation = normal.std(axis=1, ddof=1)
    weights = np.exp(deviation - deviation.max())
    return weights / weights.sum()


def total_score(k, v, next_k, next_v, variant: str) -> np.ndarray:
    """[11] and the paper's variants [14-16]."""
    if variant == "l2":
        return -np.linalg.norm(k.astype(np.float64), axis=1)
    if variant == "local":
        return score(k, k) + score(v, v)
    return score(k, next_k) + score(v, next_v)


def best(scores: np.ndarray, count: int) -> list[int]:
    """Indices of the highest scores, later first among equals, in order of position."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], -i))
    return sorted(order[:count])


class OracleHead:
    """One head's tokens, by number, through prompts and decoding."""

    def __init__(self, k, v, sink: int, lag: int, variant: str = "lag", *, keep: int | None = None, ratio=None):
        self.k, self.v, self.sink, self.lag, self.variant = k, v, sink, lag, variant
        self.keep, self.ratio = keep, ratio
        self.static: list[int] = []
        self.rest: list[int] = []
        self.seen = 0

    def give(self, count: int, total: int | None = None) -> None:
        """See ``count`` more tokens at once, then compress."""
        self.rest += range(self.seen, self.seen + count)
        self.seen += count
        while self.rest and len(self.static) < self.sink and self.rest[0] < self.sink:
            self.static.append(self.rest.pop(0))
        lag = self.lag
        partitions = len(self.rest) // lag - 1
        if partitions < 1:
            return
        keep = self.keep
        if keep is None:
            # [12] with what the row holds now: total retained = static + r L (parts - 1) + L + remainder.
            everything = (total or self.seen) - (self.seen - len(self.rest))
            spare = int(self.ratio * (total or self.seen) + 1e-9) - len(self.static) - lag - everything % lag
            keep = min(max(spare // (everything // lag - 1), 0), lag)
        for _ in range(partitions):
            part, following = self.rest[:lag], self.rest[lag : 2 * lag]
            scores = total_score(self.k[part], self.v[part], self.k[following], self.v[following], self.variant)
            self.static += [part[i] for i in best(scores, keep)]
            self.rest = self.rest[lag:]

    @property
    def kept(self) -> list[int]:
        return self.static + self.rest
