"""One-sentence refusals of numbers that make no sense, shared by everything that takes them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvjax.errors import UsageError


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Refuse what is not a whole number of at least ``least`` (and at most ``most``)."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise UsageError(f"{name} is {value!r}; give a whole number of at least {least}{upper}.")


def number(name: str, value: Any, least: float, most: float = math.inf, *, open_below: bool = False) -> None:
    """Refuse what is not a finite number in [least, most], or in (least, most]."""
    kind = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    # Comparisons, which NaN fails, because math.isfinite cannot take an integer beyond a float's range.
    if not kind or not least <= value <= most or value == math.inf or (open_below and value == least):
        lower = f"above {least:g}" if open_below else f"of at least {least:g}"
        upper = f" and at most {most:g}" if math.isfinite(most) else ""
        raise UsageError(f"{name} is {value!r}; give a number {lower}{upper}.")
