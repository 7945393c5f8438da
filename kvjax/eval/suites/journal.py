"""The journal of a run: every raw answer, a line each, and the settings that they were given under.

Each process of a run appends to a file of its own: ``answers.jsonl`` is that of process 0, which holds everything in
the end, and ``answers-process-1.jsonl`` is there beside it while process 1 answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from kvjax.checks import MOST_BYTES, number, whole_number
from kvjax.documents import NotADocument, parse_json, validated
from kvjax.errors import KvjaxError, UsageError, cut, quoted
from kvjax.eval.entries import check_name, check_retained
from kvjax.files import reason, write_atomically

FORMAT = 1
#: Seconds of an answer at most: sums of many, and rates made of them, stay numbers.
_MOST_SECONDS = 1e9
#: Policy and fraction, and the question's id.
_Key = tuple[str, float | None, str]
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
    def key(self) -> _Key:
        return self.policy, self.retained, self.item


class Journal:
    """A file of settings and answers, to which answers are added.

    Args:
      path: the file; an earlier run's is gone on with.
      settings: of this run; their ``questions`` are compared once they are known (:meth:`begin`).
      process: whose answers are added, of those that share the folder. Process 0 reads what is there at once, the
        others once it has begun.

    Raises:
      UsageError: the file is of another run, or of something else.
    """

    def __init__(self, path: Path, settings: RunSettings, process: int = 0):
        self.path, self.settings, self._process = path, settings, process
        self.answers: dict[_Key, Answer] = {}
        self._own = self._of(process)
        self._profiles: Mapping[tuple[str, float | None], str] = {}
        self._file: IO[bytes] | None = None
        self._kept = self._added = 0
        self._held: RunSettings | None = None
        if process == 0:
            self.read_again()

    def _of(self, process: int) -> Path:
        return self.path if process == 0 else self.path.with_stem(f"{self.path.stem}-process-{process}")

    def _others(self) -> list[Path]:
        """The files of processes other than 0."""
        return sorted(self.path.parent.glob(f"{self.path.stem}-process-*{self.path.suffix}"))

    def read_again(self) -> None:
        """Take over the answers of all processes that are on the disk by now."""
        there: dict[_Key, Answer] = {}
        for path in (self.path, *self._others()):
            if self._file is None or path != self._own:
                # A later one was asked under another profile, or is the same: of a process that was taken for lost.
                there |= {answer.key: answer for answer in self._read(path)}
        for answer in self._wanted(there):
            self.answers.setdefault(answer.key, answer)

    def _read(self, path: Path) -> list[Answer]:
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise KvjaxError(f"{path} cannot be read: {reason(error)}.") from error
        # The last piece has no end of line: it was being written when the process ended, and is dropped.
        found, kept = list[Answer](), 0
        for place, line in enumerate(lines[:-1], 1):
            try:
                value = parse_json(line)
                if place == 1:
                    held = self._header(path, value)
                    self._compare(held if self.settings.questions else dataclasses.replace(held, questions=""))
                    self._held = held if self._file is None else self._held
                else:
                    answer: Answer = validated(Answer, value)
                    found.append(answer)
            except NotADocument as error:
                raise UsageError(
                    f"{path}, line {place} is no line of a journal ({error}); choose another folder."
                ) from error
            kept += len(line) + 1
        if path == self.path:
            self._kept = kept
        return found

    @staticmethod
    def _header(path: Path, value: Any) -> RunSettings:
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise UsageError(f"{path} was not written by this version of kvjax eval; choose another folder.")
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
        self._profiles = profiles
        self.answers = {answer.key: answer for answer in self._wanted(self.answers)}

    def _wanted(self, answers: Mapping[_Key, Answer]) -> list[Answer]:
        of = self._profiles
        return [one for one in answers.values() if of.get((one.policy, one.retained), one.profile) == one.profile]

    def begin(self, questions: str) -> None:
        """The questions are known: compare them with the file's, and open this process' own.

        Process 0 comes first: it takes into its file what others left beside it when they were killed.
        """
        self.settings = dataclasses.replace(self.settings, questions=questions)
        if self._process:
            self.read_again()
        if self._held is not None:
            self._compare(self._held)
        if self._process and self._held is None:
            raise unseen(self.path, 0, self._process)
        with self._using():
            self.path.parent.mkdir(parents=True, exist_ok=True)
        if left := self._process == 0 and self._others():
            self._rewrite(self.answers.values(), left)
        with self._using():
            kept = 0 if self._process else self._kept
            self._file = self._own.open("r+b" if self._own.exists() else "wb")
            self._file.truncate(kept)
            self._file.seek(kept)
        if self._process or not kept:
            self._write(self._first)

    @property
    def _first(self) -> dict[str, Any]:
        return {"format": FORMAT, "settings": dataclasses.asdict(self.settings)}

    def check_seen(self, process: int) -> None:
        """Refuse to go on without the file that another process has begun: it writes to another disk."""
        if not self._of(process).exists():
            raise unseen(self._of(process), process, self._process)

    def add(self, answer: Answer) -> None:
        """Keep an answer: its line is on the disk when this returns."""
        if answer.key not in self.answers:
            self.answers[answer.key] = answer
            self._write(dataclasses.asdict(answer))
            self._added += 1

    def _write(self, value: Any) -> None:
        assert self._file is not None, "the journal was begun"
        with self._using():
            self._file.write(_line(value))
            self._file.flush()
            os.fsync(self._file.fileno())

    def gather(self, order: Iterable[_Key]) -> None:
        """Put the answers of all processes into the one file, in this order after those of other caches."""
        self.close()
        self.read_again()
        if others := self._others():
            place = {key: number for number, key in enumerate(order)}
            self._rewrite(sorted(self.answers.values(), key=lambda answer: place.get(answer.key, -1)), others)

    def _rewrite(self, answers: Iterable[Answer], others: Iterable[Path]) -> None:
        """Make these the file's answers, and remove the files of others, whose answers are among them."""
        content = b"".join(map(_line, [self._first, *map(dataclasses.asdict, answers)]))
        write_atomically(self.path, content)
        self._kept = len(content)
        with self._using():
            for path in others:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _using(self) -> Any:
        try:
            yield
        except OSError as error:
            raise KvjaxError(f"{self._own} cannot be written: {reason(error)}.") from error

    def close(self) -> None:
        """Close the file; what it holds stays."""
        file, self._file = self._file, None
        if file is not None:
            with self._using():  # what a full disk did not take is tried once more
                file.close()

    def drop_empty(self) -> None:
        """Remove a closed file that was begun and has no answer, with its folder where nothing else is in it."""
        begun_here = self._process > 0 or self._held is None
        if self._added or (self.answers and self._process == 0) or not begun_here or not self._own.exists():
            return
        with self._using():
            self._own.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another's file is in it, or another removes it too
            self.path.parent.rmdir()


def unseen(path: Path, process: int, here: int) -> KvjaxError:
    """The refusal of a folder that two processes have on disks of their own."""
    return KvjaxError(
        f"Process {here} does not see {path}, which process {process} has begun; --out must name one folder that all "
        "hosts share."
    )


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _plain(value: Any) -> str:
    return "none" if value is None else cut(", ".join(map(str, value)) if isinstance(value, tuple) else str(value))
