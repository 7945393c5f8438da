"""The files of a job: shards that appear when they are complete, and a journal of a shard's batches so far."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvjax.batch.finished import Named, check_rows
from kvjax.batch.rows import Record
from kvjax.batch.saved import SavedRecord
from kvjax.batch.source import needed
from kvjax.documents import NotADocument, parse_json, validated
from kvjax.errors import KvjaxError
from kvjax.files import write_atomically

#: Formats of answers, by the end of their files' names.
FORMATS = ("jsonl", "parquet")


class Shard:
    """One output file and the journal it is made from.

    Batches go to a journal beside it, a line each, durable before the next one starts; when the last row is there, the
    shard is written under a name that no other process has, and renamed. A killed process so loses the batch it was in,
    and one that was taken for lost and wakes writes nothing into what another writes in its place.
    """

    def __init__(self, folder: Path, number: int, count: int, kind: str):
        self.path = folder / f"part-{number:05d}-of-{count:05d}.{kind}"
        self._kind = kind
        self._journal = folder / f".{self.path.name}.journal"

    @property
    def finished(self) -> bool:
        if self.path.exists() and not self.path.is_file():
            raise KvjaxError(f"{self.path} is no file, and the answers go there; remove it.")
        if self.path.exists() and not self.path.stat().st_size:
            raise KvjaxError(f"{self.path} is empty, which no finished shard is; remove it to have its rows answered.")
        return self.path.exists()

    def check(self, rows: Sequence[Named]) -> None:
        """Refuse a finished shard that does not hold these rows in this order, and nothing else; it stays as it is."""
        with using("read", self.path):
            check_rows(self.path, self._kind, rows)

    def recover(self, is_ours: Callable[[SavedRecord], bool] = lambda record: True) -> dict[int, Record]:
        """Records of the batches that were finished, by row; ``is_ours`` says whether one can be the shard's.

        The first line that is no whole batch of such records, or answers a row again, is dropped with all that follow:
        it was cut off, or changed.
        """
        if not self._journal.exists():
            return {}
        records: dict[int, Record] = {}
        with using("read", self._journal), self._journal.open("r+b") as file:
            kept = 0
            for line in file:
                batch = _batch(line, is_ours)
                made = {record["row"]: record for record in batch or ()}
                if batch is None or len(made) < len(batch) or made.keys() & records.keys():
                    break
                kept += len(line)
                records |= made
            file.truncate(kept)
        return records

    def note(self, batch: Sequence[Record]) -> None:
        """Make a finished batch last."""
        line = _dumps(list(batch)) + b"\n"
        with using("written", self._journal), self._journal.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def finish(self, records: Sequence[Record]) -> None:
        """Write the complete shard, in this order, and drop its journal."""
        data = _parquet(records) if self._kind == "parquet" else b"".join(_dumps(r) + b"\n" for r in records)
        try:
            write_atomically(self.path, data)
        except KvjaxError:
            # Another process has finished it meanwhile, and removed what it took for left behind.
            if not self.finished:
                raise
        self.clean()

    def clean(self) -> None:
        """Delete the journal, which a finished shard needs no more."""
        with using("removed", self._journal):
            self._journal.unlink(missing_ok=True)


@contextlib.contextmanager
def using(how: str, path: Path) -> Iterator[None]:
    """One sentence for a file that cannot be read, written or removed."""
    try:
        yield
    except OSError as error:
        raise KvjaxError(f"{path} cannot be {how}: {error.strerror or error}.") from error


def _batch(line: bytes, is_ours: Callable[[SavedRecord], bool]) -> list[Record] | None:
    """The records of a journal's line; None where it is not one that :meth:`Shard.note` wrote, of such records."""
    if not line.endswith(b"\n"):
        return None
    try:
        batch = parse_json(line)
        saved: list[SavedRecord] = validated(list[SavedRecord], batch)
    except NotADocument:
        return None  # the line that was being written when the machine went down
    if any(list(record) != read.keys for record, read in zip(batch, saved, strict=True)):
        return None
    return batch if all(map(is_ours, saved)) else None


def _dumps(value: Any) -> bytes:
    # Messages may quote halves of surrogate pairs from the input; everything else is Unicode.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def _parquet(records: Sequence[Record]) -> bytes:
    pa, parquet = needed("pyarrow", "Parquet files"), needed("pyarrow.parquet", "Parquet files")
    columns = {
        "row": pa.int64(),
        "id": pa.string(),
        "text": pa.string(),
        "finish_reason": pa.string(),
        "prompt_tokens": pa.int32(),
        "generated_tokens": pa.int32(),
        "tokens": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "prompt_logprobs": pa.list_(pa.float32()),
        "error": pa.string(),
    }
    # A file has one type a column: ids are text.
    rows = [{**record, "id": str(record["id"])} for record in records]
    table = pa.Table.from_pylist(rows, schema=pa.schema(list(columns.items())))
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()
