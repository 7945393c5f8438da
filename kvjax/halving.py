"""Search by halving."""

from __future__ import annotations

from collections.abc import Callable


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number in [low, high] that fits, or 0 where none does; what fits at n is taken to fit below."""
    best = 0
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best
