"""Turns a row of the input into the tokens to read, and an answer into the record to write."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.batch.source import Source
from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import is_unicode, whole_number
from kvjax.errors import UsageError, quoted
from kvjax.output import Output
from kvjax.prompts import tokenize

#: A record as it is written; see :func:`answered` and :func:`failed`.
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt, ready to be read.

    Attributes:
      number: of the input's row, from 0.
      id: its own, or its number where it has none.
      tokens: what is read. limit: tokens it may generate.
    """

    number: int
    id: str | int
    tokens: tuple[int, ...]
    limit: int


#: Fills a batch up: one token is read and one generated, and the row has ended.
PADDING_ROW = Row(-1, "", (0,), 1)


def read_row(lm: LanguageModel, source: Source, number: int, *, chat: bool, limit: int) -> Row | Record:
    """A row of the input as tokens, or the record that says what is wrong with it."""
    name: str | int = number
    try:
        given = source[number]
        name = _id(given, number)
        if "prompt" not in given:
            raise UsageError(f"The row has no prompt; its keys are {', '.join(map(repr, given)) or 'none'}.")
        limit = limit if given.get("max_new_tokens") is None else given["max_new_tokens"]
        whole_number("max_new_tokens", limit, 1)
        if isinstance(given["prompt"], list) and not given["prompt"]:
            raise UsageError("The prompt is empty; give text, messages or token ids.")
        found = tokenize(lm, given["prompt"], context=None, chat=chat, onto=False)
        if not found.single:
            raise UsageError("The prompt is a list of prompts; a row has one.")
        (tokens,) = found.prompts
        if not tokens:
            raise UsageError("The prompt has no tokens; give at least one character.")
        most = lm.config.max_position
        if len(tokens) > most:
            raise UsageError(f"The prompt has {len(tokens)} tokens; this model's context is {most}, so shorten it.")
    except UsageError as error:
        return failed(number, name, error)
    return Row(number, name, tokens, limit)


def row_id(source: Source, number: int) -> str | int:
    """A row's id, or its number where it has none or is bad."""
    try:
        return _id(source[number], number)
    except UsageError:
        return number


def _id(given: dict[str, Any], number: int) -> str | int:
    name = given.get("id")
    if name is None:
        return number
    if isinstance(name, bool) or not isinstance(name, (str, int)) or (isinstance(name, str) and not is_unicode(name)):
        raise UsageError(f"The id is {quoted(name)}; give text or a whole number, or leave it out.")
    return name


def order_key(name: str | int) -> tuple[bool, int, str]:
    """Whole numbers first, by value, then text."""
    return (False, name, "") if isinstance(name, int) else (True, 0, name)


def answered(row: Row, output: Output) -> Record:
    """The record of an answer."""
    record: Record = {
        "row": row.number,
        "id": row.id,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "prompt_tokens": len(row.tokens),
        "generated_tokens": len(output.tokens),
        "tokens": list(output.tokens),
    }
    asked = {"logprobs": output.logprobs, "prompt_logprobs": output.prompt_logprobs}
    return record | {name: list(values) for name, values in asked.items() if values is not None}


def failed(number: int, name: str | int, error: Exception) -> Record:
    """The record of a row that cannot be answered."""
    return {"row": number, "id": name, "error": str(error)}
