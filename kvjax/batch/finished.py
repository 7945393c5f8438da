"""Checks that a finished shard holds its rows; a file is never all in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvjax.batch.saved import SavedRecord
from kvjax.batch.source import needed
from kvjax.documents import NotADocument, parse_json, validated
from kvjax.errors import KvjaxError

#: A row's number and its id.
Named = tuple[int, str | int]


def check_rows(path: Path, kind: str, rows: Sequence[Named]) -> None:
    """Refuse a file that does not hold records of these rows, in this order, and no others.

    Of JSON lines every record is read; of Parquet the columns of rows and ids.

    Raises:
      KvjaxError: it was cut off, damaged or changed.
      OSError: it cannot be read.
    """
    if kind == "parquet":
        # A file has one type a column: ids are text.
        rows, read = [(row, str(name)) for row, name in rows], _rows_of_parquet
    else:
        read = _rows_of_lines
    found = list(itertools.islice(read(path), len(rows) + 1))
    if found == list(rows):
        return
    held = len(set(found) & set(rows))
    what = f"{held} of its {len(rows)} rows" if held < len(rows) else f"more than its {len(rows)} rows, or in disorder"
    raise KvjaxError(f"{path} holds {what}; remove it to have them answered again.")


def _rows_of_lines(path: Path) -> Iterator[Named | None]:
    """The row of each line, None where there is no whole record."""
    with path.open("rb") as file:
        yield from map(_row, file)


def _row(line: bytes) -> Named | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record: SavedRecord = validated(SavedRecord, parse_json(line))
    except NotADocument:
        return None
    return record.row, record.id


def _rows_of_parquet(path: Path) -> Iterator[Named]:
    """The columns of rows and ids, which are read only where the file says that it has as many as it should."""
    pyarrow, parquet = needed("pyarrow", "Parquet files"), needed("pyarrow.parquet", "Parquet files")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["row", "id"]):
                yield from zip(batch.column("row").to_pylist(), batch.column("id").to_pylist(), strict=True)
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise KvjaxError(f"{path} is not whole; remove it to have its rows answered again.") from error
