"""Checks of an operation's arguments before anything is computed; each error is one sentence that names the fault.

A kernel trusts the shapes that it is given: an array that is too short is read out of bounds.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer

from pallas_kernels.kept_tokens import KeptTokens

FLOAT, INTEGER = "a float", "an integer"
#: The most that lengths and positions, which are int32, can count.
MOST_TOKENS = 2**31 - 1
_KINDS = {FLOAT: jnp.floating, INTEGER: jnp.integer}


def array(name: str, x: Any, shape: tuple[int | None, ...], kind: str) -> None:
    """Raise ``ValueError`` unless ``x`` is an array of this shape (``None``: any size) and kind of numbers."""
    wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(f"{name} is a {type(x).__name__}; give {kind} array of shape {wanted}.")
    fits = len(x.shape) == len(shape) and all(want in (None, size) for want, size in zip(shape, x.shape, strict=True))
    if not fits or not jnp.issubdtype(x.dtype, _KINDS[kind]):
        raise ValueError(f"{name} is {_described(x)}; give {kind} array of shape {wanted}.")


def arrays(kind: str, **given: tuple[Any, tuple[int | None, ...]]) -> None:
    """Call :func:`array` for each name's (array, shape); an array that is ``None`` was not given, and passes."""
    for name, (x, shape) in given.items():
        if x is not None:
            array(name, x, shape, kind)


def number(name: str, x: Any, *, above: float = -math.inf) -> None:
    """Raise ``ValueError`` unless ``x`` is one finite number, not 0 and above this; a tracer's value is not checked."""
    wrong = isinstance(x, numbers.Real) and not (math.isfinite(x) and float(x) > above and x != 0)
    if wrong or not (isinstance(x, numbers.Real) or getattr(x, "shape", None) == ()):
        wanted = "above 0" if above == 0 else "other than 0"
        raise ValueError(f"{name} is {_described(x)}; give one finite number {wanted}.")


def plain(x: Any) -> Any:
    """Convert a number to a Python float; a tracer to float32; ``None`` stays ``None``."""
    if isinstance(x, Tracer):
        return x.astype(jnp.float32)
    return None if x is None else float(x)


def compiled_in(*numbers: Any) -> None:
    """Raise ``NotImplementedError`` for a traced number: kernels are compiled for its value."""
    if any(isinstance(x, Tracer) for x in numbers):
        raise NotImplementedError("A kernel is compiled for its scale and cap, and one of them is traced.")


def bounds(window: int | None, soft_cap: Any) -> None:
    """Raise ``ValueError`` for a window that is no count of tokens, or a soft cap that bounds nothing."""
    if window is not None:
        at_least("window", window, 1)
        if window > MOST_TOKENS:
            raise ValueError(f"window is {_described(window)}; positions are int32, so give at most {MOST_TOKENS}.")
    if soft_cap is not None:
        number("soft_cap", soft_cap, above=0)


def per_row(name: str, x: Any, batch: int, kind: str) -> None:
    """Raise ``ValueError`` unless ``x`` is a number of this kind, a scalar array, or an array of one per batch row."""
    whole = isinstance(x, numbers.Integral)
    if whole or (kind == FLOAT and isinstance(x, numbers.Real)):
        return
    if not hasattr(x, "shape") or x.shape not in ((), (batch,)) or not jnp.issubdtype(x.dtype, _KINDS[kind]):
        raise ValueError(f"{name} is {_described(x)}; give {kind}, or one for each of {batch} rows.")


def at_least(name: str, x: Any, least: int) -> None:
    """Raise ``ValueError`` unless ``x`` is an integer of at least ``least``."""
    if not isinstance(x, numbers.Integral) or int(x) < least:
        raise ValueError(f"{name} is {_described(x)}; give an integer of at least {least}.")


def block_size(name: str, x: Any, least: int) -> None:
    """Raise ``ValueError`` unless ``x`` is a power of two of at least ``least``."""
    if not isinstance(x, numbers.Integral) or int(x) < least or int(x) & (int(x) - 1):
        raise ValueError(f"{name} is {_described(x)}; give a power of two from {least} on.")


def sizes(q: Any, tokens: int) -> None:
    """Raise ``ValueError`` where there are no queries or no keys."""
    if 0 in (*q.shape, tokens):
        raise ValueError(f"queries are {_described(q)} with {tokens} keys; give at least one of each.")


def block(requested: int | None, tokens: int, most: int) -> int:
    """Number of keys read at once: ``requested``, else the greatest common divisor of ``tokens`` and ``most``.

    Raises:
      ValueError: ``requested`` does not divide ``tokens``.
    """
    if requested is None:
        return math.gcd(tokens, most)
    at_least("block", requested, 1)
    if tokens % requested:
        raise ValueError(f"block {requested} does not divide {tokens} keys.")
    return requested


def kept_tokens(kept: KeptTokens | None, batch: int, heads: int, dim: int) -> None:
    """Raise ``ValueError`` where kept tokens do not fit the batch, heads and head size, or one another."""
    if kept is None:
        return
    array("kept.k", kept.k, (batch, heads, None, dim), FLOAT)
    slots = kept.k.shape[2]
    arrays(FLOAT, **{"kept.v": (kept.v, kept.k.shape), "kept.log_mass": (kept.log_mass, (batch, heads))})
    arrays(
        INTEGER,
        **{"kept.length": (kept.length, (batch, heads)), "kept.position": (kept.position, (batch, heads, slots))},
    )
    if kept.block < 1 or slots % kept.block:
        raise ValueError(f"kept.block is {kept.block}; give a divisor of its {slots} slots.")


def _described(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else repr(x)
