"""Jobs that are interrupted, killed or asked for again: every row once, and finished shards as they were."""

from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace

import pytest
from support.batch_rows import contents, prompts, records

import kvjax
from kvjax.batch import job as jobs
from kvjax.batch import work
from kvjax.batch.output import Shard
from kvjax.errors import KvjaxError, UsageError
from kvjax.held_folder import held

pytestmark = pytest.mark.usefixtures("quick")
ROWS = [{"prompt": text} for text in prompts(14)] + [b"bad"]


class Killed(BaseException):
    """Stands for the end of the process: nothing in kvjax catches it."""


@pytest.fixture
def whole(run):
    """What the job writes when nothing happens to it."""
    return contents(run(ROWS, "whole", shard_rows=8)[1])


def test_killed_anywhere_it_continues_to_the_same_bytes(run, whole, monkeypatch):
    """A job dies after every step that leaves something on the disk, one after the other, in one folder."""
    seen = []

    def dies_after(method):
        original = getattr(Shard, method)

        def call(self, *arguments):
            original(self, *arguments)
            raise Killed

        return call

    steps = ["note", "note", "finish", "note", "finish"]
    for step in steps:
        with monkeypatch.context() as patched:
            patched.setattr(Shard, step, dies_after(step))
            with pytest.raises(Killed):
                run(ROWS, shard_rows=8)
        held = contents(run.folder("out"))
        seen.append(sorted(held))
        assert all(held[name] == whole[name] for name in held if name.startswith("part-"))
        assert json.loads(held["manifest.json"])["state"] == "running"
    report, folder = run(ROWS, shard_rows=8)
    assert contents(folder) == whole, "byte for byte, and nothing else is left"
    assert report.answered + report.failed + report.already == len(ROWS) and report.answered == 0
    assert seen[0] == [".part-00000-of-00002.jsonl.journal", "manifest.json"]


def test_a_batch_whose_line_was_cut_off_is_answered_again(run, whole, monkeypatch):
    with monkeypatch.context() as patched:
        note = Shard.note

        def killed(self, batch):
            note(self, batch)
            if len(self.recover()) > 4:
                raise Killed

        patched.setattr(Shard, "note", killed)
        with pytest.raises(Killed):
            run(ROWS, shard_rows=8)
    (journal,) = run.folder("out").glob(".part-*.journal")
    first, second, rest = journal.read_bytes().split(b"\n")
    assert len(json.loads(first)) == len(json.loads(second)) == 4 and not rest
    for torn in (second[:50], b'{"not": "a batch"}\n', b"\xff\xfe\n"):
        journal.write_bytes(first + b"\n" + torn)
        assert len(Shard(journal.parent, 0, 2, "jsonl").recover()) == 4
        assert journal.read_bytes() == first + b"\n"
    journal.write_bytes(first + b"\n" + second[:50])
    report, folder = run(ROWS, shard_rows=8)
    assert contents(folder) == whole and report.answered == 10


def test_finished_shards_are_not_touched_and_a_finished_job_does_nothing(run, whole, monkeypatch):
    with monkeypatch.context() as patched:
        finish = Shard.finish

        def killed(self, made):
            finish(self, made)
            raise Killed

        patched.setattr(Shard, "finish", killed)
        with pytest.raises(Killed):
            run(ROWS, shard_rows=8)
    first = run.folder("out") / "part-00000-of-00002.jsonl"
    (first.parent / ".part-00000-of-00002.jsonl.journal").write_bytes(b"left by a process killed just then")
    (first.parent / ".part-00000-of-00002.jsonl.tmp").write_bytes(b"and this")
    (first.parent / ".part-00000-of-00002.jsonl-x3_k9qa0").write_bytes(b"and this")
    before = first.stat()
    run(ROWS, shard_rows=8)
    after = first.stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    assert contents(first.parent) == whole
    times = {path: path.stat().st_mtime_ns for path in first.parent.iterdir()}
    monkeypatch.setattr(work, "EngineCore", None)
    report, _ = run(ROWS)
    assert (report.answered, report.already, report.generated_tokens) == (0, len(ROWS), 0)
    assert times == {path: path.stat().st_mtime_ns for path in first.parent.iterdir()}


def test_a_process_that_wakes_where_another_took_over_damages_no_shard(tmp_path, monkeypatch):
    """It was stopped, not killed, and JAX ends it a moment after it wakes: at any line of what it was writing."""
    ours, theirs = (Shard(tmp_path, 0, 1, "jsonl") for _ in range(2))
    records = [{"row": row, "id": row, "error": "no"} for row in range(40)]

    def killed(handle):
        raise Killed

    def woken(handle):
        monkeypatch.setattr(os, "fsync", killed)
        with pytest.raises(Killed):
            theirs.finish(records[:3])
        monkeypatch.undo()

    monkeypatch.setattr(os, "fsync", woken)
    ours.finish(records)
    written = ours.path.read_bytes()
    assert len(written.splitlines()) == 40
    monkeypatch.setattr(os, "fsync", lambda handle: jobs.Manifest({}, 1).clean(tmp_path, {0}))
    theirs.finish(records)  # what it wrote was taken for left behind, and is there all the same
    assert contents(tmp_path) == {ours.path.name: written}


def test_ctrl_c_keeps_what_is_answered(run, whole, quick, monkeypatch):
    calls, iterate = [], quick.iterate

    def pressed(self):
        calls.append(len(self.waiting))
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        iterate(self)

    monkeypatch.setattr(quick, "iterate", pressed)
    with pytest.raises(KeyboardInterrupt):
        run(ROWS, shard_rows=8)
    assert len(calls) == 2, "what was under way is dropped, and nothing else is begun"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (journal,) = run.folder("out").glob(".part-*.journal")
    assert len(journal.read_bytes().splitlines()) == 1
    report, folder = run(ROWS, shard_rows=8)
    assert contents(folder) == whole and report.answered == 10


def test_the_batch_size_may_change(run, whole):
    _, folder = run(ROWS, shard_rows=8, batch_size=2)
    assert [r.get("text") for r in records(folder)] == [r.get("text") for r in records(run.folder("whole"))]
    assert run(ROWS, batch_size=4)[0].answered == 0


OTHERS = {
    "input sha256": {"rows": [*ROWS, {"prompt": "one more"}]},
    "policy": {"policy": "lagkv:ratio=0.5"},
    "storage kind": {"storage": "int8"},
    "chat": {"chat": False},
    "options max_new_tokens": {"max_new_tokens": 7},
    "options temperature": {"temperature": 0.5},
    "options seed": {"seed": 1},
    "options stop": {"stop": "x"},
    "options stop_token_ids": {"stop_token_ids": [3]},
    "options logprobs": {"logprobs": True},
    "order": {"order": "id"},
    "format": {"format": "parquet"},
    "model name": {"lm": {"name": "other"}},
    "model fingerprint": {"lm": {"stop_token_ids": (1,)}},
    "options memory_limit": {"memory_limit": 10**9},  # rows may end by "memory"
    "versions kvjax": {"version": "9.9"},
    "versions jax": {"jax": "9.9"},
}


@pytest.mark.parametrize("setting", OTHERS)
def test_another_jobs_folder_is_refused(run, whole, tiny_model, monkeypatch, setting):
    import dataclasses

    changed = dict(OTHERS[setting])
    if "version" in changed:
        monkeypatch.setattr(kvjax.version, "__version__", changed.pop("version"))
    if "jax" in changed:
        monkeypatch.setattr(jobs.jax, "__version__", changed.pop("jax"))
    lm = dataclasses.replace(tiny_model, **changed.pop("lm", {}))
    if setting == "input sha256":
        sentence = "holds another job: its input sha256 is"
    else:
        sentence = f"holds another job: its {setting} is"
    before = contents(run.folder("whole"))
    with pytest.raises(UsageError, match=sentence):
        run(changed.pop("rows", ROWS), "whole", lm=lm, **changed)
    assert contents(run.folder("whole")) == before


def test_shards_of_another_size_are_refused(run, whole):
    rows = json.loads((run.folder("whole") / "manifest.json").read_text())["shard_rows"]
    before = contents(run.folder("whole"))
    with pytest.raises(UsageError, match=f"this job in shards of {rows} rows, and shard_rows is {rows + 1}; leave it"):
        run(ROWS, "whole", shard_rows=rows + 1)
    assert run(ROWS, "whole", shard_rows=rows)[0].answered == 0 and contents(run.folder("whole")) == before


def test_other_weights_are_another_model(tiny_model):
    import toys

    assert jobs.fingerprint(tiny_model) == jobs.fingerprint(toys.tiny_model())
    assert jobs.fingerprint(tiny_model) != jobs.fingerprint(toys.tiny_model(seed=4))


@pytest.mark.parametrize("content", ["{", "[]", '{"kvjax batch": 1}', '{"kvjax batch": 1, "job": 3}', "\x00"])
def test_a_manifest_that_is_none_is_refused(run, content):
    folder = run.folder("out")
    folder.mkdir()
    (folder / "manifest.json").write_text(content)
    with pytest.raises(UsageError, match="is no manifest of a job; choose another folder"):
        run(ROWS)
    assert contents(folder) == {"manifest.json": content.encode()}


def test_a_folder_of_something_else_is_refused(run):
    folder = run.folder("out")
    folder.mkdir()
    (folder / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match=r"holds 'thesis\.tex' and no job"):
        run(ROWS)
    assert list(contents(folder)) == ["thesis.tex"]


def test_an_empty_shard_is_none_that_was_finished(run, whole):
    path = next(run.folder("whole").glob("part-*"))
    held = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(kvjax.KvjaxError, match="is empty, which no finished shard is; remove it"):
        run(ROWS, "whole")
    path.write_bytes(held)


def test_time_and_rows_are_of_the_whole_run_when_a_process_was_lost(monkeypatch):
    from kvjax.batch import counts

    shown, clock = [], iter([0.0, 10.0, 20.0, 30.0, 40.0])
    monkeypatch.setattr(counts.time, "perf_counter", lambda: next(clock))
    stage = SimpleNamespace(update=lambda done, total, note: shown.append((done, total, note)))
    row = {"row": 0, "id": 0, "text": "", "prompt_tokens": 3, "generated_tokens": 50}
    done = counts.Counts()
    done.start(10, stage)
    done.add([row] * 6)
    done.start(4, stage)
    done.add([row] * 4)
    assert shown == [(6, 10, "30 tokens/s"), (10, 10, "25 tokens/s")]


def test_a_folder_that_another_run_writes_into_is_refused(run, whole):
    """Until it has ended; then the same call finds what it wrote."""
    _, folder = run(ROWS, "out", shard_rows=8)
    with held("--output", folder), pytest.raises(UsageError, match=r"Another run writes into .*out now; wait for it"):
        run(ROWS, "out", shard_rows=8)
    assert contents(run(ROWS, "out", shard_rows=8)[1]) == whole


def test_a_later_format_is_refused(run, whole):
    path = run.folder("whole") / "manifest.json"
    path.write_text(path.read_text().replace('"kvjax batch": 1', '"kvjax batch": 2'))
    with pytest.raises(UsageError, match="another version"):
        run(ROWS, "whole")


def test_a_disk_that_refuses_is_one_sentence(run, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvjax.batch.output.os", SimpleNamespace(fsync=full))
    with pytest.raises(KvjaxError, match=r"\.journal cannot be written: No space left on device"):
        run(ROWS[:2])
