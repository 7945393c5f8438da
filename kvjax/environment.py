"""Environment variables of kvjax's own: whether one switches something on or off."""

from __future__ import annotations

import os

from kvjax.errors import UsageError, quoted

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def switched(name: str, otherwise: bool) -> bool:
    """Whether the variable switches on; ``otherwise`` where it is not set, or empty.

    Raises:
      UsageError: it is neither 0 nor 1, nor a word for one.
    """
    value = os.environ.get(name, "").strip().lower()
    if not value:
        return otherwise
    if value not in (*_ON, *_OFF):
        raise UsageError(f"The environment variable {name} is {quoted(value)}; give 0 or 1.")
    return value in _ON
