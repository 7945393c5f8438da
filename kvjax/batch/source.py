"""Rows of an input file by number: JSON lines or Parquet, read where they are needed."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import threading
from array import array
from pathlib import Path
from typing import Any, Protocol

from kvjax.documents import NotADocument, parse_json
from kvjax.errors import KvjaxError, UsageError, missing_extra
from kvjax.files import check_local, file_digest

#: Columns of a row; others are ignored.
COLUMNS = ("prompt", "id", "max_new_tokens")
#: What JSON calls values that are no object.
_JSON = {type(None): "null", bool: "boolean", str: "string", list: "array"}


class Source(Protocol):
    """A file's rows by number.

    Attributes:
      sha256: of the file's bytes.
    """

    sha256: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row as a mapping; UsageError says what is wrong with it. Threads may read at the same time."""
        ...

    def close(self) -> None: ...


def open_source(path: Path) -> Source:
    """The rows of a .jsonl (or .ndjson) or .parquet file.

    Raises:
      UsageError: another kind of file, one that is not there, or one without rows.
    """
    check_local("The input", path)
    kinds = {".jsonl": JsonLines, ".ndjson": JsonLines, ".parquet": Parquet}
    if path.suffix.lower() not in kinds:
        raise UsageError(f"{path} is neither .jsonl nor .parquet; give prompts in one of these forms.")
    try:
        source = kinds[path.suffix.lower()](path)
    except OSError as error:
        raise UsageError(f"The input {path} cannot be read: {error.strerror or error}.") from error
    if not len(source):
        source.close()
        raise UsageError(f"The input {path} has no rows; give at least one prompt.")
    return source


class JsonLines:
    """One JSON object a line. A line that is none is that row's fault alone; blank lines at the end are no rows."""

    def __init__(self, path: Path):
        digest, offset, rows = hashlib.sha256(), 0, 0
        offsets = array("Q", [0])
        self._path, self._file, self._lock = path, path.open("rb"), threading.Lock()
        for line in self._file:
            digest.update(line)
            offset += len(line)
            offsets.append(offset)
            if line.strip():
                rows = len(offsets) - 1
        self.sha256, self._offsets = digest.hexdigest(), offsets[: rows + 1]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        line = self._read(self._offsets[index], self._offsets[index + 1])
        if not line.strip():
            raise UsageError("The line is empty; give a JSON object with a prompt.")
        try:
            row = parse_json(line.decode("utf-8-sig" if index == 0 else "utf-8"))
        except UnicodeDecodeError as error:
            raise UsageError(f"The line is not UTF-8 text (byte {error.start + 1} of it).") from error
        except NotADocument as error:
            raise UsageError(f"The line is not JSON: {error}.") from error
        if not isinstance(row, dict):
            kind = _JSON.get(type(row), "number")
            raise UsageError(f'The line holds a JSON {kind}; give an object such as {{"prompt": "Hi"}}.')
        return row

    def _read(self, start: int, end: int) -> bytes:
        with self._lock:
            self._file.seek(start)
            line = self._file.read(end - start)
        if len(line) < end - start:
            raise KvjaxError(f"{self._path} became shorter while it was read; leave the input as it is.")
        return line

    def close(self) -> None:
        self._file.close()


class Parquet:
    """Columns of a Parquet file, a row group at a time."""

    def __init__(self, path: Path):
        parquet = needed("pyarrow.parquet", "Parquet files")
        import pyarrow

        try:
            self._file = parquet.ParquetFile(path, memory_map=True)
        except pyarrow.ArrowInvalid as error:
            raise UsageError(f"{path} is not a Parquet file: {str(error).splitlines()[0]}") from error
        self._path = path
        found = set(self._file.schema_arrow.names)
        if "prompt" not in found:
            raise UsageError(f"{path} has no column 'prompt'; its columns are {', '.join(sorted(found))}.")
        self._columns = [name for name in COLUMNS if name in found]
        groups = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._starts = [0, *itertools.accumulate(groups)]
        self._lock, self._held = threading.Lock(), (-1, None)
        self.sha256 = file_digest(path)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        group = bisect.bisect_right(self._starts, index) - 1
        with self._lock:
            if self._held[0] != group:
                self._held = (group, self._read(group))
            table: Any = self._held[1]
        try:
            (row,) = table.slice(index - self._starts[group], 1).to_pylist()
        except (ArithmeticError, ValueError, ImportError) as error:  # a moment that Python has no value for
            raise UsageError("The row holds a date or number that cannot be read; give text and numbers.") from error
        # A column has a value in every row: null is how Parquet leaves one out, and whole numbers some of which are
        # left out come from pandas as floats.
        row = {name: _as_int(value) if name != "prompt" else value for name, value in row.items()}
        return {name: value for name, value in row.items() if value is not None or name == "prompt"}

    def _read(self, group: int) -> Any:
        import pyarrow

        try:
            return self._file.read_row_group(group, columns=self._columns)
        except (OSError, pyarrow.ArrowException) as error:
            reason = str(error).splitlines()[0]
            raise KvjaxError(f"{self._path} cannot be read from row {self._starts[group]} on: {reason}") from error

    def close(self) -> None:
        self._file.close()


def _as_int(value: Any) -> Any:
    """Make an int of a whole number that came as a float, and None of NaN, a number left out."""
    if not isinstance(value, float) or math.isinf(value):
        return value
    return None if math.isnan(value) else int(value) if value == int(value) else value


def needed(module: str, what: str) -> Any:
    """A module of the extra ``batch``, or one sentence that says how to install it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise KvjaxError(missing_extra(f"{what} need the package {module.split('.')[0]}", "batch")) from error
