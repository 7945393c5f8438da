"""Hostile files, generated: damaged rows, jobs, journals, results, models and profiles are refused in one sentence.

Their contents are made by ``tests/support/hostile.py``; hostile flags and keywords are in ``test_hostile_input.py``.
"""

from __future__ import annotations

import functools
import json
import random
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import gguf_files, hostile
from support.judging import SEED, SESSIONS, TALK, TOPICS, Judge, prepare, try_files

from kvjax import policies
from kvjax.batch import job, output
from kvjax.checkpoints.load import load, load_config
from kvjax.errors import KvjaxError
from kvjax.options import GenerationOptions

#: A model whose files are changed.
CASE = "llama_gqa"


@pytest.fixture
def judge(tiny_model, tmp_path, monkeypatch, capsys) -> Judge:
    prepare(tiny_model, tmp_path / "here", monkeypatch)
    return Judge(tmp_path / "here", capsys)


def test_rows_and_dialogues(judge, tiny_model, tmp_path):
    from kvjax.batch.rows import read_row
    from kvjax.batch.source import open_source
    from kvjax.eval.dialogues import long_dialogues

    draw = random.Random(SEED)

    def rows() -> None:
        import contextlib

        with contextlib.closing(open_source(tmp_path / "rows.jsonl")) as source:
            for number in range(len(source)):
                record = read_row(tiny_model, source, number, chat=True, limit=4)
                if isinstance(record, dict):
                    raise KvjaxError(record["error"])

    row = {"prompt": [{"role": "user", "content": "hi"}], "id": "a", "max_new_tokens": 3}
    try_files(judge, tmp_path / "rows.jsonl", [hostile.broken_json(row, draw) for _ in range(120)], rows)
    path = tmp_path / "talks.jsonl"
    read = functools.partial(long_dialogues, tiny_model, path, most=9, least_rounds=2, tokens=None)
    for talk in (TALK, TOPICS, SESSIONS):
        try_files(judge, path, [hostile.broken_json(talk, draw) for _ in range(60)], read)
    judge.verdict(300)


def test_parquet_columns_of_every_type(tiny_model, tmp_path):
    from kvjax.batch.rows import read_row, row_id
    from kvjax.batch.source import open_source

    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kinds = [
        pa.timestamp("ns"),
        pa.timestamp("us"),
        pa.duration("ns"),
        pa.time64("ns"),
        pa.date32(),
        pa.decimal128(9, 1),
    ]
    columns = [pa.array([1, 2**31 - 1], pa.int32()).cast(pa.int64()).cast(kind) for kind in kinds[:3]]
    columns += [pa.array([1, 2], pa.int64()).cast(kinds[3]), pa.array([1, 2], pa.int32()).cast(kinds[4])]
    columns += [
        pa.array([1, 2**62], pa.int64()).cast(pa.timestamp("us")),
        pa.array([b"a", b"\xff"]),
        pa.array([1e300, 0.5]),
    ]
    columns += [pa.array([[1], []], pa.list_(pa.int64())), pa.array([{"a": 1}] * 2), pa.array([None, None])]
    for column in columns:
        for name in ("prompt", "id", "max_new_tokens"):
            table = {"prompt": ["hi", "you"]} | {name: column}
            parquet.write_table(pa.table(table), tmp_path / "rows.parquet")
            source = open_source(tmp_path / "rows.parquet")
            for row in range(2):
                record = read_row(tiny_model, source, row, chat=True, limit=2)
                said = record["error"] if isinstance(record, dict) else "."
                assert len(said) < 300 and said.endswith(".") and isinstance(row_id(source, row), (int, str)), said
            source.close()


def test_what_a_job_goes_on_from(judge, tiny_model, tmp_path, monkeypatch):
    draw, folder = random.Random(SEED), tmp_path / "out"
    folder.mkdir()

    class Source:
        sha256 = "0"

        def __len__(self) -> int:
            return 5

    made = job.Job(tiny_model, typing.cast(Any, Source()), GenerationOptions(), "input", "jsonl")
    identity = made.identity()
    monkeypatch.setattr(job.Job, "identity", lambda self: identity)
    manifest = {"kvjax batch": 1, "job": identity, "shard_rows": 8, "state": "running", "shards": 1}
    texts = [hostile.broken_json(manifest, draw) for _ in range(80)]
    texts += [json.dumps(manifest | {"shard_rows": rows}).encode() for rows in (0, -1, "x", None, 1.5, 2**63, True)]
    read = functools.partial(job.open_folder, folder, made, 8)
    try_files(judge, folder / job.MANIFEST, texts, lambda: read().shards(folder)[0].finished)
    judge.verdict(80)


def test_journals_lose_what_is_wrong_and_keep_the_rest(tmp_path):
    draw = random.Random(SEED)
    record = {"row": 1, "id": "a", "text": "b", "finish_reason": "stop", "prompt_tokens": 1}
    record |= {"generated_tokens": 1, "tokens": [5]}
    error = {"row": 2, "id": 2, "error": "no"}
    shard = output.Shard(tmp_path, 0, 1, "jsonl")
    journal = tmp_path / f".{shard.path.name}.journal"
    whole = json.dumps([error]).encode() + b"\n"
    recover = functools.partial(shard.recover, lambda record: record.row in {1, 2})
    for _ in range(100):
        line = hostile.broken_json([record], draw).replace(b"\n", b" ")
        journal.write_bytes(whole + line + b"\n" + whole)
        found = recover()
        assert found[2] == error and set(found) <= {1, 2}
        assert 1 not in found or (isinstance(found[1]["text"], str) or "error" in found[1])
    for line in (b"null", b"[null]", b"[{}]", b"[[]]", b'[{"row": 1}]', json.dumps([record | {"row": 7}]).encode()):
        journal.write_bytes(whole + line + b"\n")
        assert recover() == {2: error} and journal.read_bytes() == whole
    journal.unlink()
    journal.mkdir()
    with pytest.raises(KvjaxError, match="cannot be read"):
        recover()
    with pytest.raises(KvjaxError, match="cannot be removed"):
        shard.clean()
    shard.path.mkdir()
    with pytest.raises(KvjaxError, match="is no file"):
        _ = shard.finished


def test_what_comparisons_go_on_from(judge, tmp_path):
    import dataclasses

    from kvjax.eval import results, round_questions
    from kvjax.eval.comparison_report import report

    draw = random.Random(SEED)
    settings = results.Settings("m", "float32", ("niah_single_1",), 2)
    groups = tuple(
        results.Scored(mode, "niah_single_1", (0.0, 1.0), (1, 2)) for mode in (results.AFTER, results.IN_VIEW)
    )
    rows = [results.Row(300, "full", None, answers=groups), results.Row(300, "lagkv", 0.5, answers=groups)]
    machine = {"versions": {"jax": "1"}, "processor": "x", "cores": 2, "date": "2026-01-01T00:00"}
    content = results.as_json(settings, rows, machine, [])
    path = tmp_path / "results.json"

    def gone_on() -> None:
        report(settings, results.read_rows(path, settings), machine).json()

    try_files(judge, path, [hostile.broken_json(content, draw) for _ in range(150)], gone_on)
    asked = round_questions.Settings("m", "float32", "d", 100, 8, 2)
    answer = round_questions.Answer(
        "d", "k", 0, "full", 3, (0,), (1,), (5, 6), 2, None, 9, 9, 1, 1, 1, 1, (1.0,), (2.0,)
    )
    content = {"settings": dataclasses.asdict(asked), "answers": [dataclasses.asdict(answer)]}
    path2 = tmp_path / "answers.json"

    def answers() -> None:
        assert all(found.turn > 0 for found in round_questions.read_answers(path2, asked))

    try_files(judge, path2, [hostile.broken_json(content, draw) for _ in range(100)], answers)
    judge.verdict(250)


def test_models_and_profiles(judge, tmp_path):
    draw = random.Random(SEED)
    folder, case = tmp_path / "model", gguf_files.case(CASE)
    gguf_files.write_folder(case, folder)
    texts = [hostile.broken_json(case.config, draw) for _ in range(150)]
    try_files(judge, folder / "config.json", texts, lambda: load_config(folder))
    whole = gguf_files.write_case(case, tmp_path / "whole.gguf").read_bytes()
    counts = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
    keys = [f"llama.{name}" for name in (*counts, "attention.head_count_kv")]
    path = tmp_path / "a" / "a.gguf"
    path.parent.mkdir()
    texts = [hostile.with_gguf_value(whole, key, value) for key in keys for value in hostile.GGUF_VALUES]
    try_files(judge, path, texts, lambda: load_config(path), True)
    for _ in range(60):
        place = draw.randrange(min(len(whole), 6000))
        damaged = whole[:place] + draw.randbytes(draw.randrange(1, 9)) + whole[place + 1 :]
        try_files(judge, path, [damaged], lambda: load(path, progress=False))
    profile = yaml.safe_load(next(policies_profiles()).read_text())
    path = tmp_path / "p" / "p.yaml"
    path.parent.mkdir()
    texts = [hostile.broken_yaml(profile, draw) for _ in range(40)]
    try_files(judge, path, texts, lambda: policies.parse(f"razor:profile={path}"))
    judge.verdict(300)


def policies_profiles() -> Iterable[Path]:
    from kvjax.policies.profile_files import folder

    return iter(sorted(folder().glob("*.yaml")))
