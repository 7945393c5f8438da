"""One-sentence refusals of numbers that make no sense, shared by everything that takes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvjax.errors import UsageError

# NumPy is imported where it is used: the command line makes its flags of checked options, and --help loads nothing.


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Refuse what is not a whole number of at least ``least`` (and at most ``most``)."""
    import numpy as np

    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise UsageError(f"{name} is {value!r}; give a whole number of at least {least}{upper}.")


def number(name: str, value: Any, least: float, most: float = math.inf, *, open_below: bool = False) -> None:
    """Refuse what is not a finite number in [least, most], or in (least, most]."""
    import numpy as np

    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    # Comparisons, which NaN fails, because math.isfinite cannot take an integer beyond a float's range.
    if not is_number or not least <= value <= most or value == math.inf or (open_below and value == least):
        lower = f"above {least:g}" if open_below else f"of at least {least:g}"
        upper = f" and at most {most:g}" if math.isfinite(most) else ""
        raise UsageError(f"{name} is {value!r}; give a number {lower}{upper}.")


def true_or_false(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    import numpy as np

    if not isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{name} is {value!r}; give True or False.")


#: The dtypes that weights, and with them a cache, may have.
DTYPES = ("float32", "bfloat16", "float16")


def float_dtype(value: Any) -> Any:
    """The dtype that ``value`` names, one of DTYPES; UsageError for any other."""
    import jax.numpy as jnp

    choose = f"choose {', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
    try:
        found = jnp.dtype(value)
    except TypeError as error:
        raise UsageError(f"dtype is {str(value)[:80]!r}; {choose}.") from error
    if value is None or found.name not in DTYPES:
        raise UsageError(f"dtype is {found.name}; {choose}.")
    return found


def optional(check: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """The same check, which None passes."""
    return lambda name, value: None if value is None else check(name, value)


def is_unicode(text: str) -> bool:
    """Whether text can be written as UTF-8: it holds no half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)
