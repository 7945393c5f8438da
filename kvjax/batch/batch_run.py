"""``kvjax.batch.run``: a file of prompts to a folder of answers, on one process or many."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from kvjax.batch.counts import Counts
from kvjax.batch.job import Job, Manifest, open_folder, rows_of_shard
from kvjax.batch.output import FORMATS, Shard
from kvjax.batch.rows import Record, Row, order_key, read_row, row_id
from kvjax.batch.saved import SavedRecord, is_for
from kvjax.batch.source import needed, open_source
from kvjax.batch.under_way import Claimed, UnderWay
from kvjax.batch.work import Worker
from kvjax.cache.quantisation import parse_storage
from kvjax.checkpoints.load import LanguageModel, check_model
from kvjax.checks import whole_number
from kvjax.documents import same
from kvjax.errors import KvjaxError, UsageError, quoted
from kvjax.files import check_local
from kvjax.held_folder import held
from kvjax.interrupt import interruptible
from kvjax.options import GenerationOptions, JobKeywords, merged, shows_options
from kvjax.planning import fitting
from kvjax.policies import Policy, parse
from kvjax.policies.best import asked_later, resolve
from kvjax.policies.window_layers import for_model
from kvjax.progress import showing, stage
from kvjax.runtime.distributed import Group, group

#: Seconds between two words of how far a process is.
_TOLD_EVERY = 1.0
ORDERS = ("input", "id")
#: Keywords of :func:`run` that are no options.
_JOB = ("batch_size", "order", "format", "shard_rows")
#: Options of a generation that may go on, as no row of a job does.
_OF_TURNS = ("reserve_tokens",)


@dataclasses.dataclass(frozen=True)
class Report:
    """The numbers of a run, all processes together.

    Attributes:
      rows: of the job. already: rows that earlier runs had answered.
      answered, failed: rows this run wrote an answer, or an error, for.
      prompt_tokens, generated_tokens: of this run.
      seconds: of this run, loading of the model apart.
      files: the job's output, in order.
      lost: processes that were killed or silent; the others answered what they had claimed.
      choice: where the policy was asked for as ``best``, the one that it became and why, in one line.
    """

    rows: int
    already: int
    answered: int
    failed: int
    prompt_tokens: int
    generated_tokens: int
    seconds: float
    files: tuple[Path, ...]
    lost: tuple[int, ...] = ()
    choice: str | None = None


@shows_options(_OF_TURNS)
def run(
    lm: LanguageModel,
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: GenerationOptions | None = None,
    *,
    batch_size: int = 8,
    order: str = "input",
    format: str | None = None,
    shard_rows: int | None = None,
    **keywords: Unpack[JobKeywords],
) -> Report:
    """Answer every row of a file, into a folder; the same call continues a run that was interrupted or killed.

    A row is {"prompt", "id"?, "max_new_tokens"?}; a prompt is text, messages or token ids, as for
    :func:`kvjax.generate`. Its record has "row", "id", "text", "finish_reason", "prompt_tokens", "generated_tokens",
    "tokens" and, when asked for, "logprobs" and "prompt_logprobs"; a row that cannot be answered has "row", "id" and
    "error"; Parquet has ids as text. Row i draws by (seed, i), as in one call of ``generate`` with all prompts.

    Where ``jax.distributed.initialize()`` was called, every process calls this with the same arguments: each claims one
    shard after the other and answers it on its own devices, and the output does not depend on how many there are. What
    a process that is killed has claimed, the others answer, where JAX lets them live: ``kvjax batch`` asks it to
    (``jax_enable_recoverability``).

    Args:
      lm: a model from :func:`kvjax.load`.
      input: a .jsonl or .parquet file, the same on every host.
      output: a folder, made when it is not there: shards part-00000-of-00004.jsonl, each complete or not there,
        and manifest.json, which says whose they are. Shared by all hosts, or one on each.
      options: how to answer, for all rows.
      batch_size: rows a process answers together, fewer where so many do not fit; may change when a job is continued.
      order: of the output: "input", or "id" (whole numbers first, then text; a row without one has its number).
      format: of the output, "jsonl" or "parquet"; by default the input's.
      shard_rows: rows of a shard; by default all of a small job, a quarter of one of 64 batches, and about 4,096 at
        most; with several processes 32 shards each, of a batch at least. A job that was begun keeps its own and
        refuses another number.
      keywords: fields of :class:`kvjax.GenerationOptions`, in place of those of ``options``:

    Raises:
      UsageError: a request that makes no sense, or a folder that holds another job.
      DoesNotFit: not even the shortest prompt fits the device; under a policy of rounds, ``batch_size`` of them.
      PeerFailed: another process failed; all end.
      KeyboardInterrupt: Ctrl-C; finished batches are kept.
    """
    chosen = merged("batch.run", options, keywords, also=_JOB, without=_OF_TURNS)
    if chosen.reserve_tokens is not None:
        raise UsageError("The options have reserve_tokens, but a job's rows have no later turns; leave it out.")
    whole_number("max_new_tokens", chosen.max_new_tokens, 1)
    whole_number("batch_size", batch_size, 1)
    batch_size = int(batch_size)
    if shard_rows is not None:
        whole_number("shard_rows", shard_rows, 1)
        shard_rows = int(shard_rows)
    _check_path("input", input, "file")
    _check_path("output", output, "folder")
    if order not in ORDERS:
        raise UsageError(f"order is {quoted(order)}; choose 'input' or 'id'.")
    path = Path(input)
    if (kind := format or ("parquet" if path.suffix.lower() == ".parquet" else "jsonl")) not in FORMATS:
        raise UsageError(f"format is {quoted(format)}; choose 'jsonl' or 'parquet'.")
    if kind == "parquet":
        needed("pyarrow.parquet", "Parquet files")  # now, and not when a shard is complete
    check_model(lm)
    later = asked_later(context=False, new_tokens=chosen.max_new_tokens, reserve_tokens=None)
    asked = resolve(parse(chosen.policy or "full"), lm.config, later=later)
    chosen = dataclasses.replace(chosen, policy=asked.policy)
    _check_options(lm, chosen, asked.policy, batch_size)
    everyone = group()
    with everyone.together(), contextlib.closing(open_source(path)) as source:
        job = Job(lm, source, chosen, order, kind)
        return dataclasses.replace(_Run(job, Path(output), everyone, batch_size).run(shard_rows), choice=asked.line)


def _check_path(name: str, given: Any, kind: str) -> None:
    """Refuse (UsageError) what is no path on this machine."""
    if not isinstance(given, (str, os.PathLike)):
        raise UsageError(f"{name} is {quoted(given)}; give a path.")
    if not os.fspath(given):
        raise UsageError(f"{name} is an empty path; name a {kind}.")
    check_local(f"--{name}", given)


def _check_options(lm: LanguageModel, options: GenerationOptions, asked: Policy, batch_size: int) -> None:
    """Refuse options that this model cannot have (UsageError), or whose shortest prompt does not fit (DoesNotFit)."""
    policy, storage = for_model(asked, lm.config), parse_storage(options.storage)
    policy.check(lm.config)
    options.stop_ids(lm)
    kinds = {"dtype": lm.params.dtype, "memory_limit": options.memory_limit, "storage": storage, "mesh": lm.mesh}
    least = batch_size if policy.offloads_rounds else 1 if lm.mesh is None else lm.mesh.data
    fitting(lm.config, policy, least, 1, exact=True, scored=options.prompt_logprobs, **kinds)


class _Run:
    """One process' part of a run."""

    def __init__(self, job: Job, folder: Path, everyone: Group, size: int) -> None:
        self._job, self._folder, self._group = job, folder, everyone
        size = min(size, len(job.source))
        # Padding rows fill a mesh up.
        self._size = size if job.lm.mesh is None else job.lm.mesh.rows(size)
        self._counts, self._shared = Counts(), 0.0

    def run(self, shard_rows: int | None) -> Report:
        """Do this process' part, and wait for the others; process 0 holds the folder for all of them."""
        with held("--output", self._folder) if self._group.process == 0 else contextlib.nullcontext():
            return self._run(shard_rows)

    def _run(self, shard_rows: int | None) -> Report:
        rows = shard_rows or rows_of_shard(len(self._job.source), self._group.processes, self._size)
        manifest = self._agree(rows)
        if shard_rows not in (None, manifest.shard_rows):
            raise UsageError(
                f"{self._folder} holds this job in shards of {manifest.shard_rows} rows, and shard_rows is "
                f"{shard_rows}; leave it out, or choose another folder."
            )
        shards = manifest.shards(self._folder)
        self._order = self._ordered()
        finished, turn = self._finished(manifest, shards, 0), 0
        # Process 0 tells for all.
        with showing(self._job.options.progress if self._group.process == 0 else False):
            # More than once where a process is lost: the others answer what it had claimed.
            while todo := [i for i in range(len(shards)) if i not in finished]:
                self._answer(manifest, shards, todo, turn)
                turn += 1
                finished = self._finished(manifest, shards, turn)
        return self._report(manifest, shards)

    def _finished(self, manifest: Manifest, shards: Sequence[Shard], turn: int) -> set[int]:
        """The shards that are there, on the disk of any process; what earlier runs left is checked before it counts."""
        here = [i for i, shard in enumerate(shards) if shard.finished]
        told = self._group.gather(f"finished {turn}", json.dumps(here))
        holders: dict[int, list[int]] = {}
        for process, text in sorted(told.items()):
            for i in json.loads(text):
                holders.setdefault(i, []).append(process)
        for i in here:
            # Of a folder that all share each process checks a part.
            if turn == 0 and holders[i][i % len(holders[i])] == self._group.process:
                shards[i].check([(number, row_id(self._job.source, number)) for number in self._numbers(manifest, i)])
        manifest.clean(self._folder, set(here))
        return set(holders)

    def _agree(self, shard_rows: int) -> Manifest:
        """The manifest, which process 0 begins or continues; the others must have the same job."""
        mine = json.dumps(self._job.identity())
        manifest = open_folder(self._folder, self._job, shard_rows) if self._group.process == 0 else None
        content = self._group.gather("manifest", json.dumps(manifest and dataclasses.asdict(manifest)))[0]
        agreed = Manifest(**json.loads(content))
        if not same(agreed.job, json.loads(mine)):
            raise KvjaxError(f"Process {self._group.process} has another model, input or version than process 0.")
        self._folder.mkdir(parents=True, exist_ok=True)
        agreed.check_files(self._folder)
        return agreed

    def _ordered(self) -> np.ndarray | None:
        """Rows in the output's order, or None when that is the input's."""
        source = self._job.source
        if self._job.order == "input":
            return None
        ids = [row_id(source, i) for i in range(len(source))]
        return np.array(sorted(range(len(ids)), key=lambda i: (*order_key(ids[i]), i)))

    def _answer(self, manifest: Manifest, shards: Sequence[Shard], todo: Sequence[int], turn: int) -> None:
        """Answer shards as this process gets to them; Ctrl-C ends between two chunks of tokens."""
        each = f" (process 0 of {self._group.processes})" if self._group.processes > 1 else ""
        with stage("job", f"kvjax batch{each}:", unit="prompts") as shown, interruptible() as interrupt:
            self._counts.start(sum(len(manifest.rows(i)) for i in todo), shown)

            def between() -> None:
                if interrupt.requested:
                    raise KeyboardInterrupt
                self._group.check()
                self._share()

            def read(number: int) -> Claimed:
                return shards[number], self._rows(manifest, number)

            def ours(record: SavedRecord, row: Row) -> bool:
                return is_for(record, row, self._job.lm, self._job.options)

            claimed = (todo[i] for i in self._group.claims(f"shards {turn}", len(todo)))
            alone = self._group.processes == 1
            with (
                contextlib.closing(UnderWay(claimed, read, ours, self._counts, ahead=alone)) as under_way,
                contextlib.closing(Worker(self._job, self._size, between)) as worker,
            ):
                for made in worker.answer(under_way.take):
                    under_way.add(made)

    def _numbers(self, manifest: Manifest, shard: int) -> Sequence[int]:
        """The numbers of a shard's rows, in the output's order."""
        rows = manifest.rows(shard)
        return rows if self._order is None else self._order[rows.start : rows.stop].tolist()

    def _rows(self, manifest: Manifest, shard: int) -> list[Row | Record]:
        """A shard's rows as tokens, in the output's order; records of those that cannot be read."""
        job, numbers = self._job, self._numbers(manifest, shard)
        limit = job.options.max_new_tokens
        # In the input's order, in which Parquet's groups are read once each.
        read = {i: read_row(job.lm, job.source, i, chat=job.options.chat, limit=limit) for i in sorted(numbers)}
        return [read[i] for i in numbers]

    def _share(self) -> None:
        """Tell the others how far this process is, and hear how far they are, once a second."""
        now = time.monotonic()
        if self._group.processes > 1 and now - self._shared >= _TOLD_EVERY:
            self._shared = now
            self._group.tell("counts", json.dumps(self._counts.numbers))
            others = self._group.told("counts").items()
            self._counts.others([json.loads(text) for number, text in others if number != self._group.process])

    def _report(self, manifest: Manifest, shards: Sequence[Shard]) -> Report:
        """All processes' numbers; the job is finished when the last has told its own."""
        done = self._counts
        live = self._group.gather("done", json.dumps(done.numbers))
        told = {**self._group.told("counts"), **live}  # of those that were lost, what they said last
        lost = tuple(sorted(told.keys() - live.keys()))
        answered, failed, prompt, generated = (
            sum(column) for column in zip(*(json.loads(text) for text in told.values()), strict=True)
        )
        if self._group.process == 0 and manifest.state != "finished":
            dataclasses.replace(manifest, state="finished").write(self._folder)
        rows = manifest.job["input"]["rows"]
        files = tuple(shard.path for shard in shards)
        already = max(0, rows - answered - failed)  # what a lost one did after its last word counts as an earlier run's
        return Report(rows, already, answered, failed, prompt, generated, done.seconds, files, lost)
