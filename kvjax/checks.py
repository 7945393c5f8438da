"""Reads and checks numbers, shared by everything that takes them: each has a least and a most."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from kvjax.errors import UsageError, quoted

# NumPy is imported where it is used: the command line makes its flags of checked options, and --help loads nothing.

#: The largest count of tokens, rows, slots or repetitions: the sum of two is an int32, in which devices count.
MOST = 2**30
#: The largest number of tokens that a policy's option may name; longer contexts are not known, and sums stay int32.
MOST_SLOTS = 2**24
#: The widest kernel of a pooling.
MOST_KERNEL = 2**12 - 1
#: The largest number of bytes.
MOST_BYTES = 2**60
#: The largest fraction, factor or temperature: what float32 holds.
MOST_NUMBER = 3e38
#: The largest seed of random numbers.
MOST_SEED = 2**32 - 1


def whole_number(name: str, value: Any, least: int, most: int = MOST) -> None:
    """Refuse what is not a whole number of ``least`` to ``most``."""
    import numpy as np

    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        raise UsageError(f"{name} is {quoted(value)}; {give_whole_number(value, least, most)}.")


def row_number(owner: str, value: Any, rows: int) -> int:
    """The number of one of the ``rows`` of what ``owner`` names; refuse anything else."""
    try:
        whole_number("row", value, 0, rows - 1)
    except UsageError:
        raise UsageError(f"The {owner} has no row {quoted(value)}; its rows are 0 to {rows - 1}.") from None
    return int(value)


def give_whole_number(value: Any, least: int, most: int = MOST) -> str:
    """The end of a refusal: the values that are accepted; the bound of every count is said only where it was passed."""
    known = most in (MOST, MOST_SLOTS, MOST_KERNEL, MOST_BYTES) and not (isinstance(value, int) and value > most)
    return f"give a whole number of at least {least}" + ("" if known else f" and at most {most}")


def number(name: str, value: Any, least: float, most: float = MOST_NUMBER, *, open_below: bool = False) -> None:
    """Refuse what is not a finite number in [least, most], or in (least, most]."""
    import numpy as np

    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    # Comparisons, which NaN fails, because math.isfinite cannot take an integer beyond a float's range.
    if not is_number or not least <= value <= most or (open_below and value == least):
        lower = f"above {least:g}" if open_below else f"of at least {least:g}"
        passed = most < MOST_NUMBER or (is_number and value > most and value != math.inf)
        upper = f" and at most {most:g}" if passed else ""
        finite = "finite " if is_number and abs(value) == math.inf else ""
        raise UsageError(f"{name} is {quoted(value)}; give a {finite}number {lower}{upper}.")


def true_or_false(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    import numpy as np

    if not isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{name} is {quoted(value)}; give True or False.")


#: The dtypes that weights, and with them a cache, may have.
DTYPES = ("float32", "bfloat16", "float16")


def float_dtype(value: Any) -> Any:
    """The dtype that ``value`` names, one of DTYPES; UsageError for any other."""
    import jax.numpy as jnp

    choose = f"choose {', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
    try:
        found = jnp.dtype(value)
    except (TypeError, ValueError, SyntaxError, RecursionError) as error:  # NumPy reads text as a structure's fields
        raise UsageError(f"dtype is {quoted(value)}; {choose}.") from error
    if value is None or found.name not in DTYPES:
        raise UsageError(f"dtype is {found.name}; {choose}.")
    return found


def optional(check: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """The same check, which None passes."""
    return lambda name, value: None if value is None else check(name, value)


def read_whole_number(text: str, least: int = -MOST, most: int = MOST) -> int:
    """A whole number of ``least`` to ``most`` from its text; ValueError for anything else, and for digits without end.

    Python itself reads "1_0" and digits of every alphabet; neither is what anybody meant.
    """
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,40}\s*", text) or not least <= (value := int(text)) <= most:
        raise ValueError(f"{quoted(text)} is not a whole number of {least} to {most}")
    return value


def read_number(text: str) -> float:
    """A finite number from its text; ValueError for anything else."""
    if "_" in text or not text.isascii() or not abs(value := float(text)) <= MOST_NUMBER:
        raise ValueError(f"{quoted(text)} is not a finite number")
    return value


def stripped(name: str, parts: Iterable[str]) -> list[str]:
    """The parts of a list that was typed, without the spaces around them; UsageError where one is empty."""
    found = [part.strip() for part in parts]
    if not all(found):
        raise UsageError(f"{name} has an empty item; write names with one comma between two, and none at an end.")
    return found


def is_unicode(text: str) -> bool:
    """Whether text can be written as UTF-8: it holds no half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)
