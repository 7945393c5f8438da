"""Standard errors and paired differences of scores, by bootstrap with a seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Estimated:
    """A mean over tasks and its standard error (NaN where a task has one sample)."""

    mean: float
    error: float


@dataclasses.dataclass(frozen=True)
class Difference:
    """A paired difference: its mean, standard error, 95 % interval, and two-sided p-value."""

    mean: float
    error: float
    low: float
    high: float
    p: float


def _resampled(groups: Sequence[Sequence[float]], seed: int) -> np.ndarray:
    """[RESAMPLES] means over groups, the samples of each drawn with replacement.

    Deviations are scaled by sqrt(n / (n - 1)): without it the variance of a mean of n resampled values is too small by
    (n - 1) / n, which is half where a task has two questions.
    """
    rng = np.random.default_rng(seed)
    means = []
    for group in groups:
        values, count = np.asarray(group, float), len(group)
        drawn = values[rng.integers(0, count, (RESAMPLES, count))].mean(axis=1)
        means.append(values.mean() + (drawn - values.mean()) * math.sqrt(count / (count - 1)))
    return np.mean(means, axis=0)


def estimate(groups: Mapping[str, Sequence[float]], seed: int) -> Estimated:
    """The mean of the tasks' means, each task's samples resampled; NaN without any samples."""
    values = [group for group in groups.values() if group]
    if not values:
        return Estimated(math.nan, math.nan)
    mean = float(np.mean([np.mean(group) for group in values]))
    if any(len(group) < 2 for group in values):
        return Estimated(mean, math.nan)
    return Estimated(mean, float(np.std(_resampled(values, seed), ddof=1)))


def difference(groups: Mapping[str, Sequence[tuple[float, float]]], seed: int) -> Difference | None:
    """The difference of pairs (one, other), first minus second; None where a task has fewer than two.

    The p-value is twice the smaller fraction of resampled means on either side of 0, of which each counts once more
    than it occurred, so that none is 0. It is at least that of a sign test in which all pairs that differ do so in one
    direction: equal differences have no spread to resample, and two of them would be significant.
    """
    gaps = [[one - other for one, other in pairs] for pairs in groups.values() if pairs]
    if not gaps or any(len(group) < 2 for group in gaps):
        return None
    drawn = _resampled(gaps, seed)
    low, high = np.quantile(drawn, [0.025, 0.975])
    below, above = int((drawn <= 0).sum()), int((drawn >= 0).sum())
    least = 2.0 ** (1 - sum(gap != 0 for group in gaps for gap in group))
    p = min(1.0, max(least, 2 * (min(below, above) + 1) / (RESAMPLES + 1)))
    mean = float(np.mean([np.mean(group) for group in gaps]))
    return Difference(mean, float(np.std(drawn, ddof=1)), float(low), float(high), p)
