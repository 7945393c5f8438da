"""Prompts of the harness as token ids: divided, shortened, and gathered into batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvjax.errors import DoesNotFit, UsageError, quoted

Ids = tuple[int, ...]
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt of one request.

    Attributes:
      number: of the request, in the order in which results are due.
      before: ids that are compressed before the rest is read; () where all of them are compressed together.
      rest: the ids after them.
      continuation: ids that are scored, or () where an answer is generated.
    """

    number: int
    before: Ids
    rest: Ids
    continuation: Ids = ()

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.before) + len(self.rest)

    def shortened(self, most: int) -> Prompt:
        """The last ``most`` tokens of the prompt."""
        gone = max(self.tokens - most, 0)
        rest = self.rest[max(gone - len(self.before), 0) :]
        return dataclasses.replace(self, before=self.before[gone:], rest=rest)


def question_start(encode: Callable[[str], Sequence[int]], text: str, ids: Sequence[int], separator: str) -> int:
    """The number of ``ids``, those of ``text``, before the last occurrence of ``separator``.

    Only ids that ``text`` has in common with what stands before the separator: a token that reaches into the question
    belongs to it.

    Raises:
      UsageError: there is none, or nothing before it.
    """
    place = text.rfind(separator)
    if place < 0:
        raise UsageError(
            f"A prompt has no {quoted(separator)}, the question_separator; it ends in {quoted(text[-60:])}."
        )
    before = encode(text[:place]) if place else []
    same = next((i for i, (one, other) in enumerate(zip(before, ids, strict=False)) if one != other), len(before))
    if not 0 < same < len(ids):
        raise UsageError(
            f"A prompt has nothing before {quoted(separator)}, the question_separator, that could be compressed: "
            f"{quoted(text)}."
        )
    return same


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts that run together; ``shared``: they have what is compressed in common, and it is read once."""

    prompts: tuple[Prompt, ...]
    shared: bool


def batches(prompts: Iterable[Prompt], size: int) -> list[Batch]:
    """Prompts in batches of at most ``size`` rows, the shortest first.

    Compiled programs belong to lengths in buckets, and a batch takes as long as its longest row. Prompts of which the
    same is compressed (the choices of a question, the questions about a text) share it where a batch has room for
    several.
    """
    groups: dict[Ids, list[Prompt]] = {}
    for prompt in prompts:
        # What is generated after the same prompt is sampled row by row; choices follow one prompt.
        shared = prompt.before or (prompt.rest if prompt.continuation else (-1, prompt.number))
        groups.setdefault(shared, []).append(prompt)
    together = [group for group in groups.values() if len(group) > 1 < size]
    alone = sorted((one for group in groups.values() if not len(group) > 1 < size for one in group), key=_order)
    found = [Batch(tuple(alone[start : start + size]), False) for start in range(0, len(alone), size)]
    for group in together:
        rows = sorted(group, key=_order)
        found += [Batch(tuple(rows[start : start + size]), True) for start in range(0, len(rows), size)]
    return sorted(found, key=lambda batch: _order(batch.prompts[-1]))


def _order(prompt: Prompt) -> tuple[int, ...]:
    return len(prompt.before), len(prompt.rest), len(prompt.continuation), prompt.number


def halving(run: Callable[[Batch], list[Result]], batch: Batch) -> list[Result]:
    """The results of a batch; one that does not fit is halved."""
    try:
        return run(batch)
    except DoesNotFit:
        if len(batch.prompts) == 1:
            raise
    half = len(batch.prompts) // 2
    parts = (Batch(some, batch.shared) for some in (batch.prompts[:half], batch.prompts[half:]))
    return [result for part in parts for result in halving(run, part)]
