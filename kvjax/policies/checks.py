"""One-sentence refusals of bad policy parameters, shared by all policies."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvjax.errors import UsageError


def at_least(name: str, value: int, least: int) -> None:
    """Refuse what is not a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} is {value!r}; give a whole number of at least {least}.")
    if value < least:
        raise UsageError(f"{name} is {value}; give at least {least}.")


def ratio_in_range(name: str, value: float) -> None:
    """Refuse what is not a share in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 < value <= 1:
        raise UsageError(f"{name} is {value!r}; give the share of tokens to retain, above 0 and at most 1.")


def only_one(policy: str, **values: object) -> None:
    """Refuse two ways of saying the same size."""
    given = [name for name, value in values.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{policy} takes one of {', '.join(values)}; {' and '.join(given)} were given.")


def one_of(name: str, value: object, accepted: Sequence[str]) -> None:
    """Refuse a word that is not among the accepted ones."""
    if value not in accepted:
        raise UsageError(f"{name} is {value!r}; give {' or '.join(repr(word) for word in accepted)}.")
