"""A record as a journal holds it, and whether it can be this job's answer to a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from kvjax.batch.rows import Row
from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import MOST_NUMBER
from kvjax.documents import same
from kvjax.errors import SENTENCE
from kvjax.options import GenerationOptions
from kvjax.text.detokenizer import text_of

#: What log-probabilities may exceed 0 by, which they do by rounding alone.
_ROUNDING = 1e-3


@dataclasses.dataclass(frozen=True)
class SavedRecord:
    """A record of an answer, or of an error, with the keys that :mod:`kvjax.batch.rows` writes, in their order."""

    row: int
    id: str | int
    text: str | None = None
    finish_reason: Literal["stop", "length", "context", "memory"] | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    tokens: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        answer = (self.text, self.finish_reason, self.prompt_tokens, self.generated_tokens, self.tokens)
        if self.error is None and None in answer:
            raise ValueError("a record has neither an answer nor an error")
        if self.error is not None and any(
            value is not None for value in (*answer, self.logprobs, self.prompt_logprobs)
        ):
            raise ValueError("a record has both an answer and an error")
        if self.error is not None and not 0 < len(self.error) <= SENTENCE:
            raise ValueError("an error is no sentence")
        if self.tokens is not None and len(self.tokens) != self.generated_tokens:
            raise ValueError("a record has not as many tokens as it says")

    @property
    def keys(self) -> list[str]:
        """The keys that it is written with."""
        return [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None]


def is_for(record: SavedRecord, row: Row, lm: LanguageModel, options: GenerationOptions) -> bool:
    """Whether a record can be what a job wrote for its row, by all that is known without asking the model."""
    tokens = record.tokens
    if tokens is None or not same(record.id, row.id):
        return same(record.id, row.id)
    first, later = (record.prompt_logprobs or ())[:1], (record.prompt_logprobs or ())[1:]
    return (
        record.prompt_tokens == len(row.tokens)
        and len(tokens) <= row.limit
        and all(0 <= token < lm.config.vocab_size for token in tokens)
        and _are_scores(record.logprobs, len(tokens) if options.logprobs else None)
        and first == ((None,) if options.prompt_logprobs else ())
        and _are_scores(later, len(row.tokens) - 1 if options.prompt_logprobs else 0)
        and record.text == text_of(lm.tokenizer, tokens, options.stop_strings)
    )


def _are_scores(values: Sequence[float | None] | None, count: int | None) -> bool:
    """Whether values are so many log-probabilities, or None where none are due."""
    if values is None or count is None:
        return values is None and count is None
    # Comparisons, which NaN fails.
    return len(values) == count and all(value is not None and -MOST_NUMBER <= value <= _ROUNDING for value in values)
