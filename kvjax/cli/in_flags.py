"""Refusals in the words of the command line: the flags of a command in place of the library's keywords."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from kvjax.cli.app import root_command
from kvjax.errors import quoted

#: What precedes a keyword that stands for itself, and not for a part of a path, a flag or a policy's text.
_BEFORE = r"(?<![\w.:=/-])"
#: What pydantic calls a text that is no number, and what would be one.
_NUMBERS = {"int_parsing": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number"}


def in_flags(sentence: str, given: Sequence[str]) -> str:
    """The sentence with the flags of the command that was ``given``: ``policy=`` is ``--policy`` to its user."""
    for name, flag, without in _flags(given):
        if without is not None:
            sentence = re.sub(rf"{_BEFORE}{name}=True\b", flag, sentence)
            sentence = re.sub(rf"{_BEFORE}{name}=False\b", without or r"\g<0>", sentence)
        sentence = re.sub(rf"{_BEFORE}{name}=(['\"])([^'\"]*)\1", rf"{flag} \2", sentence)
        sentence = re.sub(rf"{_BEFORE}{name}=None\b", f"no {flag}", sentence)
        sentence = re.sub(rf"{_BEFORE}{name}=(?=[\s,.;)]|$)", flag, sentence)
        if "_" in name:
            sentence = re.sub(rf"{_BEFORE}{name}(?![\w=(])", flag, sentence)
    return sentence


def _flags(given: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield, for each flag of the command named in ``given``: its keyword, the flag, and its negation ('' without one,
    None where it takes a value).
    """
    command = root_command()
    for word in given:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            return
        for option in command.params:
            without = "".join(option.secondary_opts) if getattr(option, "is_flag", False) else None
            for flag in option.opts:
                if flag.startswith("--"):
                    yield flag.removeprefix("--").replace("-", "_"), flag, without


def parsing_refusal(error: Any) -> str | None:
    """The sentence for a flag's value that is no number, as typer refuses it; None for its other refusals."""
    found = getattr(error.__cause__, "errors", None)
    asked = None if found is None else _NUMBERS.get(found()[0]["type"])
    option = getattr(error, "param", None)
    if found is None or asked is None or option is None:
        return None
    return f"{max(option.opts, key=len)} is {quoted(found()[0]['input'])}; give {asked}."
