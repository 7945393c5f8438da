"""Hostile input of every kind, generated: whatever is refused is one short sentence, and leaves nothing behind.

Flags, keywords, fields and files come from the types of what there is (``tests/support/hostile.py``), so a new option
is tried here without a line. What a request would run is replaced; what checks it is not.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import random
import sys
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from support import gguf_files, hostile

import kvjax
from kvjax import policies
from kvjax.batch import job, output
from kvjax.checkpoints.load import load, load_config, weights_dtype
from kvjax.cli.main import app, main
from kvjax.errors import KvjaxError
from kvjax.options import FIELDS, GenerationOptions
from kvjax.policies.names import POLICIES
from kvjax.sharding.mesh import parse_mesh

SEED = 8
#: A model whose files are changed.
CASE = "llama_gqa"


class Reached(BaseException):
    """The request was accepted; what it would have run has not been."""


def reached(*_: Any, **__: Any) -> Any:
    raise Reached


#: What runs a model, measures, downloads or joins other processes.
RUNS = (
    "kvjax.runtime.reading:read_prompts", "kvjax.rounds.strategy:read_question", "kvjax.batch.run:_Run.run",
    "kvjax.eval.compare:Comparison.run", "kvjax.eval.round_questions:RoundComparison.run",
    "kvjax.eval.recommend.measure:measure", "kvjax.eval.suites.runner:Runner", "kvjax.eval.suites.longbench:from_hub",
    "kvjax.eval.positions:retained_positions", "kvjax.eval.question_answer:last_round", "kvjax.bench.run:Bench",
    "kvjax.bench.startup:measure_startup", "kvjax.bench.start:measure", "kvjax.model.decoder:random_decoder",
    "pallas_kernels.bench.decode:run", "pallas_kernels.tune:run",
    "kvjax.calibrate.retrieval:_scores", "kvjax.calibrate.divergence:question_mass",
    "kvjax.calibrate.filters:forward_layers",
    "kvjax.checkpoints.hub:_from_hub", "kvjax.checkpoints.hub:_gguf_from_hub", "kvjax.checkpoints.hub:_download",
)  # fmt: skip


@pytest.fixture
def home(tiny_model, tmp_path, monkeypatch) -> Path:
    """A folder to be in, with files that commands read; what runs a model says so instead."""
    for name in RUNS:
        module, _, attribute = name.partition(":")
        *owners, last = attribute.split(".")
        monkeypatch.setattr(functools.reduce(getattr, owners, importlib.import_module(module)), last, reached)

    def loaded(name: str, dtype: Any = None, mesh: Any = None, **_: Any) -> Any:
        weights_dtype(dtype)
        if (over := parse_mesh(mesh)) is not None:
            _ = over.jax
        return tiny_model if name == "smollm2-135m-instruct" else load(name, progress=False)

    def joined(coordinator: Any = None, *_: Any, **__: Any) -> None:
        if coordinator is None:
            raise ValueError("coordinator_address is not known")  # what JAX says where there is no cluster
        raise Reached

    monkeypatch.setattr("jax.distributed.initialize", joined)
    monkeypatch.setattr("kvjax.cli.main.app", typer.main.get_command(app))  # else it is made for every command line
    monkeypatch.setattr(kvjax, "load", loaded, raising=False)
    monkeypatch.setattr(kvjax, "load_config", lambda name, **_: loaded(name).config, raising=False)
    monkeypatch.delenv("KVJAX_TRACEBACK", raising=False)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    Path("in.jsonl").write_text('{"prompt": "hi"}\n')
    Path("talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in (TALK, TOPICS, SESSIONS)))
    Path("flags.yaml").write_text("temperature: 0.5\n")
    Path("texts/longbench").mkdir(parents=True)
    Path("texts/longbench/trec.jsonl").write_text('{"input": "Who?", "context": "Text", "answers": ["x"]}\n')
    Path("texts/long.txt").write_text("Some words of a text. " * 100)
    return here


TALK = {"messages": [{"role": role, "content": f"{role} {i}"} for i in range(9) for role in ("user", "assistant")][:-1]}
TOPICS = {
    "prompt": "Now the record start. "
    + "".join(f"USER: I would like to discuss the topic of {t}. \n ASSISTANT: Yes. \n " for t in ("tea", "bees"))
    + "Now the record ends. Which was first?",
    "topics": ["tea", "bees"],
}
SESSIONS = {
    "question": "Where?",
    "answer": "Rome",
    "answer_session_ids": ["a"],
    "haystack_session_ids": ["a", "b"],
    "haystack_sessions": [[{"role": "user", "content": "Rome"}, {"role": "assistant", "content": "Nice"}]] * 2,
}


class Judge:
    """Tries requests and keeps those that were not refused as they should be."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        self._folder, self._capsys, self._before = folder, capsys, hostile.listing(folder)
        self.tried, self.refused, self.wrong = 0, 0, list[str]()

    def command(self, words: list[str], must_refuse: bool) -> None:
        """A command line, in this process."""
        self._capsys.readouterr()
        try:
            code = main(words)
        except Reached:
            code = None
        said = self._capsys.readouterr().err
        lines = said.splitlines()
        whole = len(lines) == 1 and said.startswith("kvjax: ")
        self._judge(words, code, said if whole or code in (None, 0) else None, must_refuse)

    def call(self, about: Any, function: Callable[[], Any], must_refuse: bool) -> None:
        """A call of the library."""
        code, said = 0, ""
        try:
            function()
        except Reached:
            pass
        except KvjaxError as error:
            code, said = 2, str(error)
        except Exception as error:  # noqa: BLE001  whatever else it is, it is wrong
            code, said = -1, f"{type(error).__name__}: {str(error)[:200]}"
        self._judge(about, code, said if code >= 0 else None, must_refuse, said)

    def _judge(self, about: Any, code: int | None, said: str | None, must_refuse: bool, error: str = "") -> None:
        self.tried += 1
        after = hostile.listing(self._folder)
        if code in (None, 0):
            good = not must_refuse
        else:
            self.refused += 1
            good = code in (1, 2) and said is not None and len(said) < 300 and "Unexpected" not in said
            good = good and "\0" not in said and after == self._before
        if not good:
            left = sorted(set(after.items()) ^ set(self._before.items()))
            self.wrong.append(f"{hostile.shown(about)}: {code}, {(said or error)[:400]!r}, {left[:3]}")
        self._before = after

    def verdict(self, most: int) -> None:
        """Fail with what was wrong; at least half of what is hostile is refused."""
        assert not self.wrong, f"{len(self.wrong)} of {self.tried}:\n" + "\n".join(self.wrong[:20])
        assert self.tried >= most and self.refused > self.tried / 2, (self.tried, self.refused)


@pytest.fixture
def judge(home, capsys) -> Judge:
    return Judge(home, capsys)


# --- flags ----------------------------------------------------------------------------------------------------

#: A command line of each command that is accepted.
COMMANDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("generate",): ("hi",), ("chat",): (), ("batch",): ("--input", "in.jsonl", "--output", "out"), ("policies",): (),
    ("plan",): ("--prompt-tokens", "8"), ("fetch",): ("a/b",), ("models",): (),
    ("bench",): ("--batch", "1", "--context", "8", "--prefill", "8"),
    ("bench", "decode"): ("--shape", "tiny", "--batch", "1", "--context", "32"), ("bench", "kernels"): ("--mean", "8"),
    ("bench", "start"): (), ("bench", "engine"): ("--simulate", "--requests", "5"), ("tune",): ("sizes.json",),
    ("calibrate", "retrieval-heads"): ("--out", "p.yaml", "--no-picture"),
    ("calibrate", "alibi-scopes"): ("--out", "p.yaml"),
    ("calibrate", "qfilters"): ("--out", "p.yaml", "--texts", "talks.jsonl"),
    ("calibrate", "watershed"): ("--out", "p.yaml", "--dialogues", "talks.jsonl", "--least-rounds", "2"),
    ("compare",): ("--out", "res"), ("compare-rounds",): ("--out", "res", "--dialogues", "talks.jsonl"),
    ("eval",): ("--suite", "longbench", "--tasks", "trec", "--data", "texts", "--out", "res"),
    ("recommend",): ("--text", "texts", "--out", "res", "--context", "400", "--passages", "1", "--needles", "1"),
    ("picture",): ("razor-heads", "--out", "x.png"), ("read",): ("text", "--out", "kept"),
    ("warm",): ("--lengths", "8"),
}  # fmt: skip


def commands(found: Any, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Any]]:
    """Every command of the application with its words."""
    for name, command in getattr(found, "commands", {}).items():
        yield from commands(command, (*path, name))
    if path and path != ("calibrate",):
        yield path, found


def typed(flag: Any) -> list[tuple[str, bool]]:
    """Words for a flag, from its type, each with whether it must refuse them."""
    kinds = hostile.kinds_of(flag.type_descriptor.annotation)
    kinds = tuple(kind for one in kinds for kind in (typing.get_args(one) or (one,)))
    if int in kinds:
        return [(text, True) for text in hostile.TYPED_WHOLE]
    if float in kinds:
        return [(text, True) for text in hostile.TYPED_NUMBERS]
    if flag.name in ("policy", "policies"):
        return [(text, "," not in text) for text in policy_texts()]
    if flag.name == "mesh":
        return [(text, False) for text in hostile.MESHES]
    if flag.name == "memory_limit":
        return [(text, True) for text in hostile.BYTES]
    if "omma-separated" in (flag.help or "") or flag.name == "stop_token_ids":
        return [(text, text != "0") for text in hostile.LISTS]
    return [(text, False) for text in hostile.TEXTS]


@functools.cache
def policy_texts() -> list[str]:
    return hostile.policy_texts({name: policies.registry()[name] for name in POLICIES})


def test_every_command_is_tried():
    assert {path for path, _ in commands(typer.main.get_command(app))} == set(COMMANDS)


def test_flags(judge, monkeypatch):
    draw, cases = random.Random(SEED), []
    for path, command in commands(typer.main.get_command(app)):
        for flag in command.params:
            if getattr(flag, "is_flag", False) or flag.name in ("help", "config"):
                continue
            opts = [opt for opt in flag.opts if opt.startswith("--")]
            for text, must in hostile.sample(draw, typed(flag), 9):
                words = [*path, *COMMANDS[path]]
                if opts:
                    words += [opts[0], text]
                elif COMMANDS[path] and path != ("policies",):
                    words[len(path)] = text
                cases.append((words, must))
    for words, must in hostile.sample(draw, cases, 900):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n"), encoding="utf-8"))
        judge.command(words, must)
    judge.verdict(900)


def test_policies_as_text(judge):
    for text in policy_texts():
        judge.call(text, lambda text=text: policies.parse(text), True)
    for text in hostile.TEXTS:
        judge.call(text, lambda text=text: policies.parse(text), True)
    judge.verdict(400)


# --- the library ----------------------------------------------------------------------------------------------


def keywords(
    function: Callable[..., Any], hints: dict[str, Any], given: dict[str, Any]
) -> Iterable[tuple[Any, Any, bool]]:
    """Calls of a function with one keyword that is hostile."""
    for name, hint in hints.items():
        for value, must in hostile.values(hint):
            yield (function, name, value), functools.partial(function, **(given | {name: value})), must


def test_options_and_fields(judge, tiny_model):
    local = {"Policy": str, "Storage": str}
    options = {
        name: hint for name, hint in typing.get_type_hints(GenerationOptions, localns=local).items() if name in FIELDS
    }
    calls: list[tuple[Any, Any, bool]] = []
    generate = functools.partial(kvjax.generate, tiny_model)
    calls += keywords(generate, options | {"n": int, "prompt": str, "context": str}, {"prompt": "hi"})
    numbers = {"prompt_tokens": int, "batch": int, "max_new_tokens": int, "memory_limit": int | None}
    calls += keywords(
        functools.partial(kvjax.plan, tiny_model), numbers | {"mesh": str, "dtype": str}, {"prompt_tokens": 8}
    )
    calls += keywords(kvjax.Mesh, {"data": int, "model": int}, {})
    calls += keywords(kvjax.Storage, {"kind": str, "headroom": float}, {})
    jobs = {"batch_size": int, "shard_rows": int | None, "order": str, "format": str, "input": str, "output": str}
    calls += keywords(functools.partial(kvjax.batch.run, tiny_model), jobs, {"input": "in.jsonl", "output": "out"})
    calls += keywords(load, {"name": str, "dtype": str, "mesh": str}, {"name": "no such model"})
    for name in POLICIES:
        cls = policies.registry()[name]
        calls += keywords(cls, dict(hostile.fields(cls)), {})
    for about, call, must in hostile.sample(random.Random(SEED), calls, 800):
        judge.call(about, call, must)
    judge.verdict(800)


# --- files ----------------------------------------------------------------------------------------------------


def try_files(
    judge: Judge, path: Path, texts: Iterable[bytes], read: Callable[[], Any], must_refuse: bool = False
) -> None:
    """Read a file with each of these contents in it."""
    for text in texts:
        path.write_bytes(text)
        judge._before = hostile.listing(path.parent)
        judge._folder = path.parent
        judge.call((path.name, text), read, must_refuse)


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
    for _ in range(100):
        line = hostile.broken_json([record], draw).replace(b"\n", b" ")
        journal.write_bytes(whole + line + b"\n" + whole)
        found = shard.recover({1, 2})
        assert found[2] == error and set(found) <= {1, 2}
        assert 1 not in found or (isinstance(found[1]["text"], str) or "error" in found[1])
    for line in (b"null", b"[null]", b"[{}]", b"[[]]", b'[{"row": 1}]', json.dumps([record | {"row": 7}]).encode()):
        journal.write_bytes(whole + line + b"\n")
        assert shard.recover({1, 2}) == {2: error} and journal.read_bytes() == whole
    journal.unlink()
    journal.mkdir()
    with pytest.raises(KvjaxError, match="cannot be read"):
        shard.recover({1, 2})
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
    from kvjax.policies.profile import folder

    return iter(sorted(folder().glob("*.yaml")))


def test_configurations(judge, tmp_path):
    draw = random.Random(SEED)
    tree = {"temperature": 0.5, "policy": {"razor": {"ratio": 0.4, "inner": {"slimkv": {}}}}, "stop": ["a"], "seed": 1}
    path = tmp_path / "flags.yaml"
    for _ in range(120):
        path.write_bytes(hostile.broken_yaml(tree, draw))
        judge.command(["generate", "hi", "--config", str(path)], False)
    judge.verdict(120)
