"""Text of benchmarks from a local folder, or from the Hugging Face hub where it is reachable."""

from __future__ import annotations

import dataclasses
import functools
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvjax.checkpoints import hub
from kvjax.documents import NotADocument, parse_json, validated
from kvjax.errors import KvjaxError, UsageError
from kvjax.files import read_bytes, reason

#: The most bytes of a file of questions or dialogues: devices have no end, and LongMemEval's largest file has 2.7 GB.
_MOST_BYTES = 4_000_000_000


class DataFolder:
    """The folder of ``--data``; every file in it is optional, and what is missing has one sentence.

    Attributes:
      found: names of the files that were found, in the folder or on the hub, in that order; a report says them.
    """

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.found: list[str] = []

    def find(self, *names: str) -> Path | None:
        """The first of these files that there is."""
        for name in names if self.folder is not None else ():
            assert self.folder is not None
            if (path := self.folder / name).exists():
                self._note(name)
                return path
        return None

    def download(self, repo: str, name: str, what: str, places: Sequence[str], revision: str | None = None) -> Path:
        """A file of a data set on the hub, downloaded once into the hub's own cache.

        Raises:
          UsageError: the hub is not reachable, or has no such file; the sentence names what --data would need.
        """
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(repo, name, repo_type="dataset", revision=revision, **hub.offline()))
        except Exception as error:
            raise UsageError(
                f"{what} is neither in --data (as {' or '.join(places)}) nor could {repo} be downloaded from the hub "
                f"({type(error).__name__}); give --data DIR with it."
            ) from error
        self._note(f"{repo}/{name}")
        return path

    def _note(self, name: str) -> None:
        if name not in self.found:
            self.found.append(name)

    def need(self, what: str, *names: str, instead: str = "") -> Path:
        """The first of these files; UsageError says what is missing, and what to do ``instead``."""
        found = self.find(*names)
        if found is None:
            where = "give --data DIR with" if self.folder is None else f"{self.folder} has no"
            raise UsageError(f"Missing: {what}; {where} {' or '.join(names)}{instead}.")
        return found


def read_text(path: Path) -> str:
    """A file's text, without a byte-order mark, its lines ended by \\n; one sentence where it cannot be read."""
    try:
        text = read_bytes(path, _MOST_BYTES).decode("utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise KvjaxError(f"{path} cannot be read: {reason(error)}.") from error


def read_json(path: Path, kind: Any = Any) -> Any:
    """The value of a JSON file, of the kind that type hints describe; UsageError names the file."""
    try:
        value = parse_json(read_text(path))
        return value if kind is Any else validated(kind, value)
    except NotADocument as error:
        raise UsageError(f"{path} is not what it should be: {error}.") from error


def read_rows(path: Path, kind: Callable[..., Any]) -> list[Any]:
    """The rows of a JSON-lines file, each as ``kind``; UsageError names the file and the line that is no such row.

    Args:
      kind: a dataclass whose fields are read; what else a row has is left out.
    """
    return rows_of(read_text(path), kind, str(path))


def rows_of(text: str, kind: Callable[..., Any], origin: str) -> list[Any]:
    """The rows of JSON-lines text; ``origin`` names it in sentences."""
    rows = []
    # Not splitlines(): JSON may hold line separators of Unicode as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            rows.append(row_of(line, kind, f"{origin}, line {number}"))
    if not rows:
        raise UsageError(f"{origin} holds no rows.")
    return rows


def row_of(line: str | dict[str, Any], kind: Callable[..., Any], where: str) -> Any:
    """One row; UsageError says where it stands and what is wrong with it."""
    try:
        value = parse_json(line) if isinstance(line, str) else line
        if not isinstance(value, dict):
            raise NotADocument("it is no JSON object")
        return validated(kind, {name: value[name] for name in value if name in _fields(kind)})
    except NotADocument as error:
        raise UsageError(f"{where} is no row of this benchmark: {error}.") from error


@functools.cache
def _fields(kind: Callable[..., Any]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))  # pyright: ignore[reportArgumentType]


def read_zipped(path: Path, name: str) -> str:
    """The text of a file in a ZIP archive, wherever in it that is."""
    try:
        with zipfile.ZipFile(path) as archive:
            member = next(inside for inside in archive.namelist() if Path(inside).name == name)
            return archive.read(member).decode("utf-8")
    except (OSError, zipfile.BadZipFile, UnicodeDecodeError, StopIteration) as error:
        raise KvjaxError(f"{path} holds no {name} that can be read.") from error


def digest_text(value: Any) -> str:
    """JSON of a value with sorted keys: what a digest is made of."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
