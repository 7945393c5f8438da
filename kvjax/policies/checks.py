"""One-sentence refusals of bad policy parameters, shared by all policies."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.errors import UsageError


def only_one(policy: str, **values: object) -> None:
    """Refuse two ways of saying the same size."""
    given = [name for name, value in values.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{policy} takes one of {', '.join(values)}; {' and '.join(given)} were given.")


def one_of(name: str, value: object, accepted: Sequence[str]) -> None:
    """Refuse a word that is not among the accepted ones."""
    if value not in accepted:
        raise UsageError(f"{name} is {value!r}; give {' or '.join(repr(word) for word in accepted)}.")
