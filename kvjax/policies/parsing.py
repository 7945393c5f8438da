"""Names of policies, and the text form ``name:field=value,field=value`` the command line and configs use.

A policy inside a policy is written with parentheses: ``razor:ratio=0.4,inner=lagkv(lag=64,sink=4)``.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import types
import typing
from typing import Any

import numpy as np

from kvjax.checks import MOST, MOST_SEED, read_number, read_whole_number
from kvjax.errors import UsageError, did_you_mean, listed, quoted
from kvjax.policies.base import Policy
from kvjax.policies.names import ALIASES, CHOICES, POLICIES

#: Policies within one another, in their text form.
DEPTH = 8
_TOO_DEEP = f"Policies are nested more than {DEPTH} deep; give one inside another a few times at most."
#: What an option of a type is said to take.
_KINDS: dict[type, str] = {int: "a whole number in digits, such as 1000", float: "a number", bool: "true or false"}
_REGISTERED: dict[str, type[Policy]] = {}


def register(name: str, policy: type[Policy]) -> None:
    """Give a policy class a name, so that ``policy="NAME:OPTION=VALUE"`` and ``--policy`` find it.

    Raises:
      UsageError: ``policy`` is not a frozen dataclass deriving from ``Policy``, or another class has that name.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy) and dataclasses.is_dataclass(policy)):
        raise UsageError(
            f"{quoted(policy)} is not a policy; register a frozen dataclass that derives from kvjax.Policy."
        )
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise UsageError(f"{quoted(name)} is no name of a policy; give one of letters, digits, - and _.")
    key = _key(name)
    known = _class_of(key) or _REGISTERED.setdefault(key, policy)
    if known is not policy:
        raise UsageError(f"The policy name {quoted(name)} already belongs to {known.__name__}; choose another.")


def registry() -> dict[str, type[Policy]]:
    """Every known policy by name; those of ``names.CHOICES`` only stand for one."""
    return {name: _load(home) for name, home in POLICIES.items()} | _REGISTERED


def options_of(policy: Policy | type[Policy]) -> list[dataclasses.Field[Any]]:
    """The fields that a user gives: those that a model's tokenizer tells a policy are none."""
    return [field for field in dataclasses.fields(policy) if not field.metadata.get("told")]


def _key(name: str) -> str:
    """The one spelling of a policy's name."""
    key = name.strip().lower().replace("-", "_")
    return ALIASES.get(key, key)


def _class_of(key: str) -> type[Policy] | None:
    """The policy of this name, imported if need be; None when there is none."""
    home = POLICIES.get(key) or CHOICES.get(key)
    return _REGISTERED.get(key) if home is None else _load(home)


def class_named(text: str) -> type[Policy] | None:
    """The class of a policy's text form, whose options are not read; None when there is none of the name."""
    return _class_of(_key(text.partition(":")[0]))


def _load(home: str) -> type[Policy]:
    module, _, name = home.partition(":")
    return getattr(importlib.import_module(module), name)


def parse(text: Any) -> Policy:
    """A policy from its text form, e.g. ``"lagkv:ratio=0.25,sink=16"``; a policy passes through.

    That of a cache that was read with ``once=True`` is the one that chose: what is kept of a choice needs the cache.

    Raises:
      UsageError: an unknown policy or field (the nearest name is suggested), or a value of the wrong kind.
    """
    if not isinstance(text, Policy):
        return _parse(text, 0)
    return _plain(text.named if text.chosen_once else text)


def _plain(policy: Policy) -> Policy:
    """A policy with Python's own numbers in place of NumPy's, so that it can be saved; itself where it has none."""
    if not dataclasses.is_dataclass(policy):
        return policy  # refused, with a sentence, where it is used
    held = {field.name: getattr(policy, field.name, None) for field in dataclasses.fields(policy) if field.init}
    plain = {
        name: value.item() if isinstance(value, np.generic) else _plain(value) if isinstance(value, Policy) else value
        for name, value in held.items()
    }
    changed = {name: value for name, value in plain.items() if value is not held[name]}
    return dataclasses.replace(policy, **changed) if changed else policy


def _parse(text: Any, depth: int) -> Policy:
    """:func:`parse` of a policy that is so deep in others."""
    if isinstance(text, type) and issubclass(text, Policy):
        raise UsageError(f"{text.__name__} is a class of policies; give one of them, such as kvjax.{text.__name__}().")
    if not isinstance(text, str):
        raise UsageError(f'{quoted(text)} is not a policy; give a kvjax policy or text such as "lagkv:ratio=0.25".')
    name, colon, options = text.strip().partition(":")
    key = _key(name)
    cls = _class_of(key)
    if cls is None:
        known = [*POLICIES, *CHOICES, *_REGISTERED]
        near = did_you_mean(key, known)
        raise UsageError(
            f"Unknown policy {quoted(name.strip())};{near} known are {listed(known)} (see `kvjax policies`)."
        )
    hints = typing.get_type_hints(cls)
    fields = {field.name: hints[field.name] for field in options_of(cls)}
    values: dict[str, Any] = {}
    if colon and not options.strip():
        raise UsageError(f"{quoted(text.strip())} ends where its options begin; write OPTION=VALUE, or no colon.")
    parts = _split(options)
    if depth > DEPTH:
        raise UsageError(_TOO_DEEP)
    for part in parts if options.strip() else ():
        field, equals, value = (piece.strip() for piece in part.partition("="))
        if not part.strip():
            raise UsageError(f"An option of {cls.__name__} is missing in {quoted(text)}; write OPTION=VALUE.")
        field = field.replace("-", "_")
        if field not in fields:
            accepted = f"it takes {listed(fields)}" if fields else "it takes none"
            raise UsageError(f"{cls.__name__} has no option {quoted(field)};{did_you_mean(field, fields)} {accepted}.")
        if not equals or not value:
            raise UsageError(f"The option {quoted(field)} of {cls.__name__} has no value; write {field}=VALUE.")
        if field in values:
            raise UsageError(f"The option {quoted(field)} of {cls.__name__} is given twice; give it once.")
        values[field] = _convert(cls, field, value, fields[field], depth)
    return cls(**values)


def format_policy(policy: Policy) -> str:
    """The text form of a policy, fields at their defaults left out; ``parse`` reads it back."""
    policy = policy.named
    cls = type(policy)
    names = {home: known for known, home in (POLICIES | CHOICES).items()} | {
        own: known for known, own in _REGISTERED.items()
    }
    name = names.get(cls) or names.get(f"{cls.__module__}:{cls.__name__}", cls.__name__)
    texts = [f"{field}={_text(value)}" for field, value in _changed(policy).items()]
    return f"{name}:{','.join(texts)}" if texts else name


def _changed(policy: Policy) -> dict[str, Any]:
    """The options that are not at their defaults, with their values."""
    values = {field.name: (getattr(policy, field.name), field.default) for field in options_of(policy)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _makes(cls: type[Policy], values: dict[str, Any], policy: Policy) -> bool:
    """Whether these options alone make the policy."""
    try:
        return cls(**values) == policy
    except UsageError:
        return False


def _text(value: Any) -> str:
    """A field's value as :func:`parse` reads it."""
    if isinstance(value, Policy):
        own = _changed(value)
        if "budget" in own and _makes(type(value), {key: own[key] for key in own if key != "budget"}, value):
            own.pop("budget")  # its own where no size is given, which it gets from the policy around it
        name = format_policy(value).partition(":")[0]
        return f"{name}({','.join(f'{field}={_text(each)}' for field, each in own.items())})" if own else name
    if isinstance(value, tuple):  # pairs, such as (layer, head)
        return "+".join(".".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in value)
    return str(value)


def _split(options: str) -> list[str]:
    """The options, cut at commas that stand in no parentheses."""
    parts, depth = [""], 0
    for letter in options:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        if depth >= DEPTH:
            raise UsageError(_TOO_DEEP)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise UsageError(
            f"The parentheses of {quoted(options)} do not match; write inner=NAME(OPTION=VALUE,OPTION=VALUE)."
        )
    return parts


def _convert(cls: type[Policy], field: str, text: str, hint: Any, depth: int) -> Any:
    """Read one value as the field's annotated type."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = typing.get_args(hint) if union else (hint,)
    if text.lower() == "none" and type(None) in kinds:
        return None
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            return text  # the class itself refuses a word it does not know
        if kind is Policy:
            inside = re.fullmatch(r"([^():]+)\((.*)\)", text, re.DOTALL)
            inner = (f"{inside[1]}:{inside[2]}" if inside[2].strip() else inside[1]) if inside else text
            return _parse(inner, depth + 1)
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind in (int, float):
            try:
                return read_whole_number(text, -MOST, MOST_SEED) if kind is int else read_number(text)
            except ValueError:
                continue
        if kind is str:
            return text
    wanted = " or ".join(words for kind, words in _KINDS.items() if kind in kinds)
    if wanted:
        bounds = f", at most {MOST_SEED}" if int in kinds and text.lstrip("+-").isdecimal() else ""
        raise UsageError(
            f"The option {field}={quoted(text)} of {cls.__name__} is not one it can use; give {wanted}{bounds}."
        )
    raise UsageError(f"The option {field} of {cls.__name__} cannot be written as text; make the policy in Python.")
