"""The results of a comparison: settings, rows, the numbers made of them, and the file that keeps them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.cache.quantisation import parse_storage
from kvjax.checks import MOST_SEED, number, whole_number
from kvjax.documents import NotADocument, parse_json, validated
from kvjax.errors import KvjaxError, UsageError, cut
from kvjax.eval.entries import REFERENCE, check_name, check_retained, entry_name
from kvjax.eval.ruler import find_task

#: The tasks of a comparison unless others are named: one needle, one of several keys, all values of a key.
DEFAULT_TASKS = ("niah_single_1", "noise_multikey", "noise_multivalue")
#: When the question of a needle task is asked: after the context was compressed, or in view of the compression.
AFTER, IN_VIEW = "after", "in view"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that all rows of one table have in common.

    Attributes:
      model, dtype: what answers.
      tasks: names of ``kvjax.eval.ruler.TASKS``.
      samples: of each task, and conversations.
      turns: whether conversations are held.
      storage: of keys and values, as ``generate`` takes it.
      seed: of the samples.
      parameters: a digest of the model's weights; empty until they are known, and in results of earlier versions.
    """

    model: str
    dtype: str
    tasks: tuple[str, ...] = DEFAULT_TASKS
    samples: int = 12
    turns: bool = True
    storage: str = "model"
    seed: int = 42
    parameters: str = ""

    def __post_init__(self) -> None:
        whole_number("samples", self.samples, 1)
        whole_number("seed", self.seed, 0, MOST_SEED)
        if not self.tasks:
            raise UsageError("No task is named; name tasks such as niah_single_1.")
        parse_storage(self.storage)
        for task in self.tasks:
            find_task(task)
        if len(set(self.tasks)) < len(self.tasks):
            raise UsageError("A task is named twice; name each once.")


@dataclasses.dataclass(frozen=True)
class Scored:
    """Answers of one group of samples, in their order: groups of two rows compare in pairs.

    Attributes:
      mode: ``AFTER``, ``IN_VIEW``, or a turn of ``kvjax.eval.follow_ups.TURNS``.
      task: of ``Settings.tasks``; empty for a conversation.
      scores: 0 to 1 each. first: the first token generated.
    """

    mode: str
    task: str
    scores: tuple[float, ...]
    first: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.first):
            raise ValueError(f"there are {len(self.scores)} scores and {len(self.first)} first tokens")
        for score in self.scores:
            number("a score", score, 0, 1)


@dataclasses.dataclass(frozen=True)
class Row:
    """One cache's results at one length; without answers when it was refused, with the reason in ``refused``.

    Attributes:
      live_bytes, allocated_bytes, full_bytes: of one sample's cache when its answer begins, the question asked after
        the compression; means over tasks and samples. ``full_bytes`` is what every token seen would take.
      prefill_tokens_per_second: reading one prompt of this length, batch 1; measured once a policy.
      decode_tokens_per_second: of a whole batch; every step counts for every row, ended or not.
      seconds, compile_seconds: what the row took, compilation included, and compilation alone.
      profile: a digest of the policy's profiles, see :func:`kvjax.eval.entries.profile_of`.
      retry: whether it was refused for what may pass, such as too little memory.
    """

    length: int
    policy: str
    retained: float | None
    refused: str | None = None
    answers: tuple[Scored, ...] = ()
    live_bytes: float = 0.0
    allocated_bytes: float = 0.0
    full_bytes: float = 0.0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    seconds: float = 0.0
    compile_seconds: float = 0.0
    profile: str = ""
    retry: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type == "float":
                number(field.name, getattr(self, field.name), 0)
        check_name(self.policy)
        check_retained(self.retained)

    @property
    def key(self) -> tuple[int, str, float | None]:
        return self.length, self.policy, self.retained

    @property
    def name(self) -> str:
        """The policy with the fraction it retains, for people."""
        return entry_name(self.policy, self.retained)

    def scored(self, mode: str) -> list[Scored]:
        """The groups of one mode."""
        return [group for group in self.answers if group.mode == mode]

    @property
    def live_fraction(self) -> float:
        """Live bytes over those of a full cache."""
        return self.live_bytes / self.full_bytes if self.full_bytes else math.nan


@dataclasses.dataclass(frozen=True)
class Saved:
    """The schema with which ``results.json`` is read; the rest of the file is computed from it."""

    settings: Settings
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            whole_number("length", row.length, 1)
        keys = {row.key for row in self.rows}
        if len(keys) < len(self.rows):
            raise ValueError("a cache has two rows at one length")
        for row in self.rows:
            if (row.length, REFERENCE, None) not in keys:
                raise ValueError(f"{row.length} tokens have no row of the {REFERENCE} cache")
        # Rows compare in pairs, sample by sample.
        answered = [row for row in self.rows if row.refused is None]
        for row in answered:
            if _samples(row) != _samples(answered[0]):
                raise ValueError(f"the row of {cut(row.name)} has not the samples of the others")


def _samples(row: Row) -> dict[tuple[str, str], int]:
    """The number of samples a row has for each mode and task."""
    return {(group.mode, group.task): len(group.scores) for group in row.answers}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean and its standard error (NaN for one sample, and for both without any)."""

    mean: float
    error: float


def estimate(groups: Sequence[Sequence[float]]) -> Estimate:
    """Mean over groups of equal weight, and its standard error from the samples of each."""
    groups = [group for group in groups if group]
    if not groups:
        return Estimate(math.nan, math.nan)
    mean = statistics.fmean(statistics.fmean(group) for group in groups)
    if any(len(group) < 2 for group in groups):
        return Estimate(mean, math.nan)
    variance = sum(statistics.variance(group) / len(group) for group in groups)
    return Estimate(mean, math.sqrt(variance) / len(groups))


def accuracy(row: Row, mode: str, task: str | None = None) -> Estimate:
    """A row's accuracy in a mode: mean over tasks, or of one task."""
    return estimate([group.scores for group in row.scored(mode) if task is None or group.task == task])


def first_token_agreement(row: Row, reference: Row, mode: str) -> Estimate:
    """Fraction of the samples whose first token is the reference's."""
    expected = {group.task: group.first for group in reference.scored(mode)}
    return estimate(
        [
            [float(mine == theirs) for mine, theirs in zip(group.first, expected[group.task], strict=True)]
            for group in row.scored(mode)
            if group.task in expected
        ]
    )


def as_json(settings: Settings, rows: Sequence[Row], machine: dict[str, Any], summary: Any) -> dict[str, Any]:
    """The content of ``results.json``."""
    return {
        "format": _FORMAT,
        "settings": dataclasses.asdict(settings),
        "machine": machine,
        "summary": summary,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def read_rows(path: Path, settings: Settings) -> list[Row]:
    """Rows of an earlier run; none when there is no file.

    Raises:
      UsageError: the file holds something else, or results of other settings.
    """
    if not path.exists():
        return []
    try:
        content = parse_json(path.read_bytes())
        if isinstance(content, dict) and content.get("format", _FORMAT) != _FORMAT:
            raise UsageError(f"{path} was written by another version of this command; choose another folder.")
        saved: Saved = validated(Saved, content)
    except OSError as error:
        raise KvjaxError(f"{path} cannot be read: {error.strerror}.") from error
    except NotADocument as error:
        raise UsageError(f"{path} holds no results of a comparison; choose another folder ({error}).") from error
    held = dataclasses.asdict(saved.settings)
    for name, value in dataclasses.asdict(settings).items():
        if held[name] != value and (name != "parameters" or held[name]):
            raise UsageError(
                f"{path} holds results with {name} {_plain(held[name])}, and {_plain(value)} is asked for; "
                "rows of one table share their settings, so choose another folder."
            )
    return list(saved.rows)


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
