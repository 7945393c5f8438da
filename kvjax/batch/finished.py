"""Checks that a finished shard holds its rows; a file is never all in memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvjax.batch.source import needed
from kvjax.errors import KvjaxError


def check_rows(path: Path, kind: str, rows: Sequence[int]) -> None:
    """Refuse a file that does not hold these rows, in this order, and no others.

    Raises:
      KvjaxError: it was cut off, damaged or changed.
      OSError: it cannot be read.
    """
    read = _rows_of_parquet if kind == "parquet" else _rows_of_lines
    found = list(itertools.islice(read(path), len(rows) + 1))
    if found == list(rows):
        return
    held = len(set(found) & set(rows))
    what = f"{held} of its {len(rows)} rows" if held < len(rows) else f"more than its {len(rows)} rows, or in disorder"
    raise KvjaxError(f"{path} holds {what}; remove it to have them answered again.")


def _rows_of_lines(path: Path) -> Iterator[int | None]:
    """The row of each line, None where there is no whole record."""
    with path.open("rb") as file:
        yield from map(_row, file)


def _row(line: bytes) -> int | None:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or ("text" in record) == ("error" in record):
        return None
    return row if type(row := record.get("row")) is int else None


def _rows_of_parquet(path: Path) -> Iterator[int | None]:
    """The column of rows, which is read only where the file says that it has as many as it should."""
    pyarrow, parquet = needed("pyarrow", "Parquet files"), needed("pyarrow.parquet", "Parquet files")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["row"]):
                yield from batch.column("row").to_pylist()
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise KvjaxError(f"{path} is not whole; remove it to have its rows answered again.") from error
