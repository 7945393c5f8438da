"""A job's identity and its manifest, by which a run knows that it may continue what another began."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from kvjax import version
from kvjax.batch.output import Shard, using
from kvjax.batch.source import Source
from kvjax.cache.quantisation import parse_storage
from kvjax.checkpoints.digest import weights_digest
from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import MOST_NUMBER, whole_number
from kvjax.documents import NotADocument, parse_json, same, validated
from kvjax.errors import KvjaxError, UsageError, quoted
from kvjax.files import write_atomically
from kvjax.held_folder import unusable
from kvjax.options import FIELDS, GenerationOptions
from kvjax.policies import format_policy, parse

MANIFEST = "manifest.json"
#: Options that a manifest holds by themselves, in their text form, or that change no answer.
_BESIDE_OPTIONS = ("policy", "storage", "chat", "reserve_tokens", "progress")
_KIND, _FORMAT = "kvjax batch", 1
#: Rows of a shard at most: a shard is what is read ahead.
_MOST_ROWS = 4096
#: Batches of a shard at least, where a process has as many: batches of similar length are made of a shard's rows.
_BATCHES = 16
#: Shards of a job of one process that is large enough, so that files come before the end.
_SHARDS_ALONE = 4
#: Shards for each of several processes: one that is three times slower then delays the end by a tenth at most.
_SHARDS_EACH = 32


#: Names of shards and of what they are made from, with the shard's number and how many there are.
_SHARD_FILE = re.compile(r"\.?part-([0-9]{5,9})-of-([0-9]{5,9})\.[a-z]+(?:\.(?:journal|tmp))?")
#: What is left beside a shard by a process that was killed; earlier versions wrote shards as ``.tmp``.
_LEFT = re.compile(r"\.part-([0-9]{5,9})-of-[0-9]{5,9}\.[a-z]+(?:\.(?:journal|tmp)|-\w+)")


@dataclasses.dataclass(frozen=True)
class Job:
    """The rows to answer and how: all that two runs must share to write one output.

    Attributes:
      lm: the model. source: the input. options: as for :func:`kvjax.generate`.
      order: "input" or "id". kind: of the output's files, "jsonl" or "parquet".
    """

    lm: LanguageModel
    source: Source
    options: GenerationOptions
    order: str
    kind: str

    def identity(self) -> dict[str, Any]:
        """The job as JSON; equal for equal jobs."""
        options = {name: _written(name, self.options) for name in FIELDS if name not in _BESIDE_OPTIONS} | {
            "n": 1,
            "stop": list(self.options.stop_strings),
            "stop_token_ids": sorted(self.options.stop_ids(self.lm)),
        }
        storage = parse_storage(self.options.storage)
        settings = {
            "input": {"sha256": self.source.sha256, "rows": len(self.source)},
            "model": {
                "name": self.lm.name,
                "dtype": str(np.dtype(self.lm.params.dtype)),
                "fingerprint": fingerprint(self.lm),
                **({} if self.lm.config.weights is None else {"weights": self.lm.config.weights}),
            },
            "policy": format_policy(parse(self.options.policy or "full")),
            "storage": dataclasses.asdict(storage) | {"headroom": float(storage.headroom)},
            "chat": self.options.chat,
            "options": options,
            "order": self.order,
            "format": self.kind,
            "versions": {"kvjax": version.__version__, "jax": jax.__version__},
        }
        return json.loads(json.dumps(settings, default=str))


def _written(name: str, options: GenerationOptions) -> Any:
    """An option's value, which is a float wherever it may be one: 0 and 0.0 ask for the same."""
    value = getattr(options, name)
    return float(value) if isinstance(FIELDS[name].default, float) else value


def fingerprint(lm: LanguageModel) -> str:
    """A digest of the model's shape, its vocabulary and its weights."""
    digest = hashlib.sha256(repr((lm.config, lm.stop_token_ids)).encode())
    digest.update(b"\0".join(lm.tokenizer.token_bytes()))
    digest.update(weights_digest(lm.params).encode())
    return digest.hexdigest()


def rows_of_shard(rows: int, processes: int, batch_size: int) -> int:
    """Rows of each shard: full batches; many shards where processes claim them, so that none waits long for another."""
    rows_each = -(-rows // processes)
    most = -(-rows_each // _MOST_ROWS)
    if processes == 1:
        each = max(1, min(_SHARDS_ALONE, rows_each // (_BATCHES * batch_size)), most)
        return -(-rows // (each * batch_size)) * batch_size
    each = max(_SHARDS_EACH, most)
    return max(1, rows // (processes * each * batch_size)) * batch_size


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``.

    Attributes:
      job: :meth:`Job.identity`. shard_rows: rows of each shard, the last may have fewer.
      state: "running" or "finished".
    """

    job: dict[str, Any]
    shard_rows: int
    state: Literal["running", "finished"] = "running"

    def __post_init__(self) -> None:
        whole_number("shard_rows", self.shard_rows, 1)

    @property
    def shard_count(self) -> int:
        return -(-self.job["input"]["rows"] // self.shard_rows)

    def shards(self, folder: Path) -> list[Shard]:
        """All shards of the job."""
        return [Shard(folder, i, self.shard_count, self.job["format"]) for i in range(self.shard_count)]

    def check_files(self, folder: Path) -> None:
        """Refuse a folder with files of shards that are not the job's, so that no row is there twice or left out."""
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise unusable("--output", folder, error) from error
        for name in names:
            found = _SHARD_FILE.fullmatch(name)
            if found and not int(found[1]) < int(found[2]) == self.shard_count:
                raise UsageError(
                    f"{folder} holds {quoted(name)}, and the job that {MANIFEST} describes has {self.shard_count} "
                    f"shard{'s' * (self.shard_count > 1)}; restore {MANIFEST}, or choose another folder."
                )

    def clean(self, folder: Path, finished: Collection[int]) -> None:
        """Delete what killed processes, or earlier ones, left beside the shards with these numbers."""
        with using("read", folder):
            names = os.listdir(folder)
        for name in names:
            if (found := _LEFT.fullmatch(name)) and int(found[1]) in finished:
                with using("removed", folder / name):
                    (folder / name).unlink(missing_ok=True)

    def rows(self, shard: int) -> range:
        """Positions of a shard's rows in the output's order."""
        return range(shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.job["input"]["rows"]))

    def write(self, folder: Path) -> None:
        content = {_KIND: _FORMAT, **dataclasses.asdict(self), "shards": self.shard_count}
        write_atomically(folder / MANIFEST, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def open_folder(folder: Path, job: Job, shard_rows: int) -> Manifest:
    """Begin the job in a folder, or continue it there.

    Args:
      folder: which is there, and :func:`kvjax.held_folder.held`.
      job: the job. shard_rows: for a new one.

    Raises:
      UsageError: the folder holds another job, or files that are none of a job's.
    """
    try:
        there = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise unusable("--output", folder, error) from error
    identity = job.identity()
    if MANIFEST in there:
        return _continued(folder / MANIFEST, identity)
    # A manifest that was being written when the process was killed is no one's file.
    foreign = [name for name in there if not name.startswith(f".{MANIFEST}-")]
    if foreign:
        raise UsageError(f"{folder} holds {quoted(foreign[0])} and no job; choose an empty folder or a new one.")
    manifest = Manifest(identity, shard_rows)
    manifest.write(folder)
    return manifest


def _continued(path: Path, identity: dict[str, Any]) -> Manifest:
    try:
        content = parse_json(path.read_bytes())
        if isinstance(content, dict) and not same(content.get(_KIND, _FORMAT), _FORMAT):
            raise UsageError(f"{path} was written by another version of this command; choose another folder.")
        manifest: Manifest = validated(Manifest, content)
        if _KIND not in content:
            raise NotADocument(f"{_KIND}: Field required")
    except OSError as error:
        raise KvjaxError(f"{path} cannot be read: {error.strerror}.") from error
    except NotADocument as error:
        raise UsageError(f"{path} is no manifest of a job; choose another folder ({error}).") from error
    for name, (old, new) in _differences(manifest.job, identity).items():
        raise UsageError(
            f"{path.parent} holds another job: its {name} is {quoted(old)}, and {quoted(new)} is asked for; choose "
            "another folder."
        )
    manifest = dataclasses.replace(manifest, job=identity)
    count, said = manifest.shard_count, content.get("shards", manifest.shard_count)
    if not same(said, count):
        raise UsageError(
            f"{path} was changed: it says {quoted(said)} shards, and shard_rows {manifest.shard_rows} makes {count}; "
            "restore it, or choose another folder."
        )
    return manifest


def _differences(old: Any, new: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Settings that differ, named by their path; those that come first in the new come first."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        # Earlier versions wrote 0 where 0.0 is written now.
        old_number = float(old) if type(old) is int and type(new) is float and abs(old) <= MOST_NUMBER else old
        return {} if same(old_number, new) else {name: (old, new)}
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*new, *(key for key in old if key not in new)]:
        found |= _differences(old.get(key), new.get(key), f"{name} {key}".strip())
    return found
