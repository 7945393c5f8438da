"""The arguments of the harness's model ``kvjax``: how they are written, and what they may be.

The harness parts them at commas, which policies and meshes contain: theirs are written as semicolons.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from kvjax.cache.quantisation import Storage, parse_storage
from kvjax.checks import optional, read_whole_number, whole_number
from kvjax.errors import UsageError, quoted
from kvjax.policies import Policy, parse

#: What stands for a comma within an argument.
COMMA = ";"
#: The word for a model that the harness's own backends take.
_HARNESS_NAME = "pretrained"
_WHOLE = ("batch_size", "max_length", "seed")
_HINT = f'write a policy\'s commas as {COMMA!r}, as in "policy=snapkv:budget=64;window=8"'


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that every request of a run shares.

    Attributes:
      policy: which tokens of a prompt stay. storage: as what; None is the model's dtype.
      way: how continuations are scored, as :func:`kvjax.score` takes it.
      batch_size: rows at a time, fewer where they do not fit.
      max_length: tokens of a prompt with its continuation; longer ones lose their beginning.
      question_separator: text at whose last occurrence a prompt is divided, or None.
      seed: of samples.
    """

    policy: Policy
    storage: Storage | None
    way: Literal["prefill", "decode"]
    batch_size: int
    max_length: int | None
    question_separator: str | None
    seed: int

    @classmethod
    def of(cls, **given: Any) -> Settings:
        """Settings from what a user wrote; UsageError, one sentence, for what makes no sense."""
        way, separator = given["way"], given["question_separator"]
        if way not in ("prefill", "decode"):
            raise UsageError(f"way is {quoted(way)}; give prefill or decode.")
        if separator is not None and (not isinstance(separator, str) or not separator):
            raise UsageError(f"question_separator is {quoted(separator)}; give text that stands before the question.")
        numbers = {name: _whole(given[name]) for name in _WHOLE}
        whole_number("batch_size", numbers["batch_size"], 1)
        optional(lambda name, value: whole_number(name, value, 2))("max_length", numbers["max_length"])
        whole_number("seed", numbers["seed"], 0, 2**32 - 1)
        policy = parse(with_commas(given["policy"]))
        storage = None if given["storage"] is None else parse_storage(given["storage"])
        return cls(policy=policy, storage=storage, way=way, question_separator=separator, **numbers)


def _whole(value: Any) -> Any:
    """A whole number that was written as text; anything else as it is."""
    try:
        return read_whole_number(value) if isinstance(value, str) else value
    except ValueError:
        return value


def with_commas(text: Any) -> Any:
    """A policy or a mesh as its user meant it: with commas."""
    return text.replace(COMMA, ",") if isinstance(text, str) else text


def from_text(text: str) -> dict[str, Any]:
    """Arguments from ``name=value,name=value``, or from a JSON object.

    Raises:
      UsageError: neither of them.
    """
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise UsageError(f"The model's arguments are no JSON object: {error}.") from error
        return found
    found = {}
    for part in filter(str.strip, text.split(",")):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise UsageError(f"The model's argument {quoted(part)} has no value; write NAME=VALUE, and {_HINT}.")
        if name in found:
            raise UsageError(f"The model's argument {quoted(name)} is given twice; give it once, and {_HINT}.")
        found[name] = {"true": True, "false": False, "none": None}.get(value.lower(), value)
    return found


def checked(given: Mapping[str, Any], added: Mapping[str, Any], accepted: Mapping[str, Any]) -> dict[str, Any]:
    """The model's arguments and what the harness adds to them, of which its user's own win.

    Args:
      given: ``pretrained``, the harness's own word for a model, may stand for ``name``.
      accepted: names of all arguments.

    Raises:
      UsageError: an unknown argument, no model, or two.
    """
    # The harness names results after what it finds under this word, so its own dictionary keeps it.
    given = dict(given)
    if _HARNESS_NAME in given and "name" not in given:
        given["name"] = given.pop(_HARNESS_NAME)
    for name in given:
        if name not in accepted:
            known = [one for one in accepted if one not in ("device", "max_batch_size")]
            raise UsageError(f"The model kvjax takes no {quoted(name)}; it takes {', '.join(known)}; {_HINT}.")
    if given.get("name") is None:
        raise UsageError("The harness's model kvjax has no name=; give a model as `kvjax generate --model` takes it.")
    merged = {**added, **given}
    return {name: value for name, value in merged.items() if value is not None and name in accepted}
