"""Run-time checks of the shapes that signatures promise, for functions; see conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int where a float is promised is fine


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check a function's arguments and result.

    Constructors are left alone: JAX rebuilds registered dataclasses from whatever leaves a transformation carries.
    """
    return function if function.__name__ == "__init__" else _check(function)
