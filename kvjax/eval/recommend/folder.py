"""The folder of a recommendation: what was measured, from which the same command goes on, and the report."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.documents import NotADocument, parse_json, validated
from kvjax.errors import KvjaxError, UsageError, cut, quoted
from kvjax.eval.entries import REFERENCE
from kvjax.eval.recommend.measure import Measured
from kvjax.files import write_atomically

RESULTS, TABLE, PICTURE = "recommendation.json", "recommendation.md", "recommendation.png"
_MEASURED = "measured.json"
#: All files that a run leaves.
FILES = (RESULTS, TABLE, PICTURE, _MEASURED)


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that two runs must share to go on with one another's rows.

    Attributes:
      model, number_format: of the weights. storage: of the caches. texts: a digest.
      context, batch: the request. tokens, passages, needles, seed: what is measured.
      parameters: a digest of the weights; empty in folders of earlier versions.
    """

    model: str
    number_format: str
    storage: str
    texts: str
    context: int
    batch: int
    tokens: int
    passages: int
    needles: int
    seed: int
    parameters: str = ""


#: Of the settings that are digests, what they are of; and the flags that are not called as their settings.
_DIGESTS = {"texts": "texts", "parameters": "weights"}
_FLAGS = {"number_format": "--dtype and --weights", "tokens": "--measured-tokens"}


def digest(texts: Sequence[str]) -> str:
    """A digest of the texts, in their order."""
    found = hashlib.sha256()
    for text in texts:
        found.update(hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest())
    return found.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class _Saved:
    settings: Settings
    rows: tuple[Measured, ...]

    def __post_init__(self) -> None:
        if len({row.policy for row in self.rows}) < len(self.rows):
            raise ValueError("a policy has two rows")
        wanted = self.settings.passages * self.settings.needles, self.settings.passages
        for row in self.rows:
            if row.refused is None and (len(row.found), len(row.losses)) != wanted:
                raise ValueError(f"the row of {cut(row.policy)} has not {wanted[0]} in found and {wanted[1]} in losses")
            if row.refused is not None and row.policy == REFERENCE:
                raise ValueError("the full cache is refused")


class Folder:
    """The folder that holds a recommendation's rows."""

    def __init__(self, path: Path, settings: Settings):
        self.path, self._settings = path, settings

    def earlier(self) -> list[Measured]:
        """Rows of an earlier run of the same settings; none where there was no run.

        Raises:
          UsageError: the folder holds a run of other settings, or a file that is none of a run's.
          KvjaxError: it cannot be read.
        """
        file = self.path / _MEASURED
        try:
            saved: _Saved = validated(_Saved, parse_json(file.read_bytes()))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise KvjaxError(f"{file} cannot be read: {error.strerror}.") from error
        except NotADocument as error:
            raise UsageError(f"{file} was not written by this command; choose another --out ({error}).") from error
        for field in dataclasses.fields(Settings):
            old, new = getattr(saved.settings, field.name), getattr(self._settings, field.name)
            if old != new and (field.name != "parameters" or old):
                what = _DIGESTS.get(field.name)
                flag = _FLAGS.get(field.name, f"--{field.name}")
                held = f"of other {what}" if what else f"with {flag} {quoted(old)}, and {quoted(new)} is asked for"
                raise UsageError(f"{self.path} holds measurements {held}; choose another --out.")
        return list(saved.rows)

    def save(self, rows: Sequence[Measured]) -> None:
        """Keep the rows that are measured so far."""
        content = {"settings": dataclasses.asdict(self._settings), "rows": [dataclasses.asdict(row) for row in rows]}
        self.write(_MEASURED, json.dumps(content, indent=1) + "\n")

    def write(self, name: str, content: Any) -> None:
        """One of its files, whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / name, content)
