"""The largest haystack that fits, by RULER's search."""

from __future__ import annotations

from collections.abc import Callable

from kvjax import halving
from kvjax.errors import UsageError


def largest(cost: Callable[[int], int], room: int, low: int, high: int) -> int:
    """The largest size in [low, high] whose cost is within ``room``; ``low`` where none is.

    Every size that is tried draws random numbers, so the order of trials, by halving, is the benchmark's.
    """
    return halving.largest(low, high, lambda size: cost(size) <= room) or low


def too_short(length: int, task: str, least: int | None = None) -> UsageError:
    """The error for a length that the task's smallest sample, of ``least`` tokens where they are known, exceeds."""
    more = "needs more" if least is None else f"takes {least}"
    return UsageError(f"{length} tokens are too few for the task {task}; its smallest sample {more}.")
