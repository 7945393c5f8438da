"""The journal of a run: every raw answer, a line each, and the settings that they were given under."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from kvjax.checks import MOST_BYTES, number, whole_number
from kvjax.documents import NotADocument, parse_json, validated
from kvjax.errors import KvjaxError, UsageError, cut, quoted
from kvjax.eval.entries import check_name, check_retained
from kvjax.files import reason

FORMAT = 1
#: Seconds of an answer at most: sums of many, and rates made of them, stay numbers.
_MOST_SECONDS = 1e9
#: Why an answer that is kept may have ended: one that Ctrl-C ended is asked again.
_REASONS = ("stop", "length", "context", "memory")


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings that all answers of one folder share.

    Attributes:
      mode: "after" or "in view". questions: a digest of all questions and the model's number
        format; empty until they are known.
    """

    model: str
    dtype: str | None
    weights: str | None
    suite: str
    tasks: tuple[str, ...]
    length: int | None
    limit: int | None
    quick: bool
    seed: int
    mode: str
    storage: str
    batch_size: int
    questions: str = ""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One raw answer.

    Attributes:
      policy, retained: the cache. item: the question's id.
      text: as generated, before a metric reads it; of scored choices their log-probabilities as JSON.
      tokens: that were generated. prompt_tokens: of the whole prompt.
      live_bytes, allocated_bytes, full_bytes: of the cache when the answer is complete.
      read_seconds, decode_seconds: this row's part of what its batch took, compilation apart.
      read_tokens: of the prompt, those that were read in that time, without what an earlier question shared; None in
        answers of earlier versions, which read all of it.
      first_token: the first id that was generated; None where none was, and in answers of earlier versions.
      profile: a digest of the policy's profiles, see :func:`kvjax.eval.entries.profile_of`.
    """

    policy: str
    retained: float | None
    item: str
    text: str
    tokens: int
    finish_reason: str
    prompt_tokens: int
    live_bytes: int
    allocated_bytes: int
    full_bytes: int
    read_seconds: float
    decode_seconds: float
    read_tokens: int | None = None
    first_token: int | None = None
    profile: str = ""

    def __post_init__(self) -> None:
        check_name(self.policy)
        check_retained(self.retained)
        if self.finish_reason not in _REASONS:
            raise UsageError(f"finish_reason is {quoted(self.finish_reason)}; give one of {', '.join(_REASONS)}.")
        whole_number("tokens", self.tokens, 0)
        whole_number("prompt_tokens", self.prompt_tokens, 1)
        for name in ("read_tokens", "first_token"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 0)
        for name in ("live_bytes", "allocated_bytes", "full_bytes"):
            whole_number(name, getattr(self, name), 0, MOST_BYTES)
        for name in ("read_seconds", "decode_seconds"):
            number(name, getattr(self, name), 0, _MOST_SECONDS)

    @property
    def key(self) -> tuple[str, float | None, str]:
        return self.policy, self.retained, self.item


class Journal:
    """A file of settings and answers, to which answers are added.

    Args:
      path: the file; an earlier run's is gone on with.
      settings: of this run; their ``questions`` are compared once they are known (:meth:`begin`).

    Raises:
      UsageError: the file is of another run, or of something else.
    """

    def __init__(self, path: Path, settings: RunSettings):
        self.path, self.settings = path, settings
        self.answers: dict[tuple[str, float | None, str], Answer] = {}
        self._file: IO[bytes] | None = None
        self._kept = 0
        self._held: RunSettings | None = None
        if path.exists():
            self._read()

    def _read(self) -> None:
        try:
            lines = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise KvjaxError(f"{self.path} cannot be read: {reason(error)}.") from error
        # The last piece has no end of line: it was being written when the process ended, and is dropped.
        for place, line in enumerate(lines[:-1], 1):
            try:
                value = parse_json(line)
                if place == 1:
                    self._held = self._header(value)
                else:
                    answer: Answer = validated(Answer, value)
                    self.answers[answer.key] = answer  # a later one was asked under another profile
            except NotADocument as error:
                raise UsageError(
                    f"{self.path}, line {place} is no line of a journal ({error}); choose another folder."
                ) from error
            self._kept += len(line) + 1
        if self._held is not None:
            self._compare(dataclasses.replace(self._held, questions=self.settings.questions))

    def _header(self, value: Any) -> RunSettings:
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise UsageError(f"{self.path} was not written by this version of kvjax eval; choose another folder.")
        return validated(RunSettings, value.get("settings"))

    def _compare(self, held: RunSettings) -> None:
        """Refuse settings that are not those of the file."""
        for field in dataclasses.fields(RunSettings):
            old, new = getattr(held, field.name), getattr(self.settings, field.name)
            if old != new:
                raise UsageError(
                    f"{self.path.parent} holds answers with {field.name} {_plain(old)}, and {_plain(new)} is asked "
                    "for; the answers of one report share their settings, so choose another folder."
                )

    def forget_others(self, profiles: Mapping[tuple[str, float | None], str]) -> None:
        """Leave out answers of caches whose policies had other profiles than these."""
        self.answers = {
            key: answer
            for key, answer in self.answers.items()
            if profiles.get((answer.policy, answer.retained), answer.profile) == answer.profile
        }

    def begin(self, questions: str) -> None:
        """The questions are known: compare them with the file's, and open it."""
        self.settings = dataclasses.replace(self.settings, questions=questions)
        if self._held is not None:
            self._compare(self._held)
        with self._using():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("r+b" if self.path.exists() else "wb")
            self._file.truncate(self._kept)
            self._file.seek(self._kept)
        if self._held is None:
            self._write({"format": FORMAT, "settings": dataclasses.asdict(self.settings)})

    def add(self, answer: Answer) -> None:
        """Keep an answer: its line is on the disk when this returns."""
        if answer.key not in self.answers:
            self.answers[answer.key] = answer
            self._write(dataclasses.asdict(answer))

    def _write(self, value: Any) -> None:
        assert self._file is not None, "the journal was begun"
        with self._using():
            self._file.write(json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def _using(self) -> Any:
        try:
            yield
        except OSError as error:
            raise KvjaxError(f"{self.path} cannot be written: {reason(error)}.") from error

    def close(self) -> None:
        """Close the file; what it holds stays."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def drop_empty(self) -> None:
        """Remove a closed file that was begun and has no answer, with its folder where nothing else is in it."""
        if self.answers or self._held is not None or not self.path.exists():
            return
        with self._using():
            self.path.unlink()
            if not any(self.path.parent.iterdir()):
                self.path.parent.rmdir()


def _plain(value: Any) -> str:
    return "none" if value is None else cut(", ".join(map(str, value)) if isinstance(value, tuple) else str(value))
