"""One-sentence refusals of bad policy parameters, shared by all policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvjax.errors import UsageError, quoted


def only_one(policy: str, **values: object) -> None:
    """Refuse two ways of saying the same size."""
    given = [name for name, value in values.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{policy} takes one of {', '.join(values)}; {' and '.join(given)} were given.")


def one_of(name: str, value: object, accepted: Sequence[str]) -> None:
    """Refuse a word that is not among the accepted ones."""
    if not isinstance(value, str) or value not in accepted:
        raise UsageError(f"{name} is {quoted(value)}; give {' or '.join(repr(word) for word in accepted)}.")


def changed(policy: Any, names: Sequence[str]) -> list[str]:
    """Which of these options of a policy differ from their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(policy)}
    return [name for name in names if getattr(policy, name) != defaults[name]]


def refuse_shared_layers(outer: str, policy: Any) -> None:
    """Refuse a policy whose layers share their slots where one is asked in each layer by itself."""
    if policy.shares_layers:
        raise UsageError(f'{outer} chooses in each layer by itself; give its inner policy scope="layer".')


def refuse_unused(policy: Any, names: Sequence[str], reason: str) -> None:
    """Refuse options that were changed although nothing would read them; ``reason`` begins the sentence.

    Called from :meth:`Policy.check` rather than when a policy is made, so that saved policies can always be read.
    """
    if unused := changed(policy, names):
        raise UsageError(f"{reason}; leave out {' and '.join(unused)}.")
