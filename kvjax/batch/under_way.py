"""The shards that a process has claimed and not finished: rows to answer come from them, and records go to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvjax.batch.counts import Counts
from kvjax.batch.output import Shard
from kvjax.batch.rows import Record, Row
from kvjax.batch.saved import SavedRecord

#: A shard with its rows, in the output's order; records of those that cannot be read.
Claimed = tuple[Shard, Sequence[Row | Record]]


class UnderWay:
    """Hands rows out shard by shard, and writes each shard when its last row is answered.

    Several shards may be under way: rows of the next one take the slots that come free while the last rows of the one
    before are answered.

    Args:
      claimed: the numbers of shards, each this process' own once it is taken.
      read: a shard of its number, and its rows.
      is_for: whether a record that an earlier run left can be this job's of a row.
      ahead: whether the next shard is claimed, and read by a thread, while the one before is answered. Where others
        could have claimed it meanwhile, this waits until its rows are needed.
    """

    def __init__(
        self,
        claimed: Iterator[int],
        read: Callable[[int], Claimed],
        is_for: Callable[[SavedRecord, Row], bool],
        counts: Counts,
        *,
        ahead: bool,
    ):
        self._claimed, self._read, self._is_for, self._counts = claimed, read, is_for, counts
        self._of_row: dict[int, _Open] = {}
        self._reader = ThreadPoolExecutor(1, "kvjax-rows") if ahead else None
        self._next: Future[Claimed | None] | None = None

    def take(self) -> list[Row] | None:
        """The rows of the next shard that no earlier run has answered; None when every shard is claimed."""
        claimed = self._claim() if self._next is None else self._next.result()
        if claimed is None:
            return None
        if self._reader is not None:
            self._next = self._reader.submit(self._claim)
        shard, rows = claimed
        good = {item.number: item for item in rows if isinstance(item, Row)}
        records = shard.recover(lambda record: record.row in good and self._is_for(record, good[record.row]))
        self._counts.skip(len(records))
        bad = [item for item in rows if not isinstance(item, Row)]
        self._counts.add(bad)
        opened = _Open(shard, rows, records | {record["row"]: record for record in bad})
        todo = [row for number, row in good.items() if number not in records]
        self._of_row |= {row.number: opened for row in todo}
        opened.finish_if_complete()
        return todo

    def _claim(self) -> Claimed | None:
        number = next(self._claimed, None)
        return None if number is None else self._read(number)

    def add(self, records: Sequence[Record]) -> None:
        """Make records last, in the shards that their rows belong to."""
        by_shard: dict[int, tuple[_Open, list[Record]]] = {}
        for record in records:
            opened = self._of_row.pop(record["row"])
            by_shard.setdefault(id(opened), (opened, []))[1].append(record)
        for opened, own in by_shard.values():
            opened.shard.note(own)
            opened.records |= {record["row"]: record for record in own}
            self._counts.add(own)
            opened.finish_if_complete()

    def close(self) -> None:
        """Read no further."""
        if self._reader is not None:
            self._reader.shutdown(wait=False, cancel_futures=True)


class _Open:
    """A shard with the records that are there."""

    def __init__(self, shard: Shard, rows: Sequence[Row | Record], records: dict[int, Record]):
        self.shard, self.records = shard, records
        self._order = [item.number if isinstance(item, Row) else item["row"] for item in rows]

    def finish_if_complete(self) -> None:
        if len(self.records) == len(self._order):
            self.shard.finish([self.records[number] for number in self._order])
