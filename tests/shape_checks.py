"""Run-time checks of the shapes that signatures promise, for functions; see conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int where a float is promised is fine


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments and the result of a function whose signature promises the shape of an array.

    Others are left alone, as they refuse wrong kinds in a sentence of their own. So are constructors: JAX rebuilds
    registered dataclasses from whatever leaves a transformation carries.
    """
    promises = any("Array, " in str(annotation) for annotation in function.__annotations__.values())
    return _check(function) if promises and function.__name__ != "__init__" else function
