"""``kvjax eval`` from the command line: one run, how it goes on, and what it refuses before anything is loaded."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import toys
from support.benchmarks import write_benchmarks
from support.long_commands import assert_refused, run_through

import kvjax
from kvjax.cli import first_steps
from kvjax.eval.suites.runner import Runner
from kvjax.sharding.mesh import Mesh, parse_mesh


@pytest.fixture
def data(tmp_path):
    return str(write_benchmarks(tmp_path / "data"))


@pytest.fixture
def asked(data, tmp_path):
    """Two data sets of LongBench, whose prompts the toy model can read."""
    out = tmp_path / "deep" / "out"
    words = ["eval", "--suite", "longbench", "--tasks", "trec,hotpotqa", "--limit", "1", "--data", data]
    return [*words, "--policies", "streamingllm", "--retained", "0.5", "--out", str(out)], out


def test_a_run_and_what_it_leaves(cli, asked, monkeypatch):
    words, out = asked
    names = ["answers.jsonl", "report.html", "report.json", "report.md", "scores.png", "tasks.png"]
    ran = run_through(cli, monkeypatch, words, out, names)
    assert "2 questions of 2 caches: about " in ran.err and "[2/2] streamingllm at 0.5" in ran.err
    assert "streamingllm" in ran.out and "report.html" in ran.out and "By task" in ran.out
    rows = (out / "answers.jsonl").read_text().splitlines()
    assert len(rows) == 1 + 4 and json.loads(rows[0])["settings"]["suite"] == "longbench"
    held = json.loads((out / "report.json").read_text())
    assert [cache["answered"] for cache in held["caches"]] == [2, 2]
    assert held["files"] == ["longbench/trec.jsonl", "longbench/hotpotqa.jsonl"]
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.name != "report.json"}
    again = cli(*words)
    assert "4 answers of an earlier run are kept" in again.err and "about" not in again.err
    assert before == {path.name: path.read_bytes() for path in out.iterdir() if path.name != "report.json"}
    other = cli(*words, "--seed", "3")
    assert other.code == 2 and "seed 42, and 3 is asked for" in other.sentence
    other = cli(*words, "--in-view")
    assert other.code == 2 and "mode after, and in view is asked for" in other.sentence


def test_ctrl_c_keeps_what_there_is(cli, asked, monkeypatch):
    words, out = asked

    def interrupted(self, entries):
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "run", interrupted)
    ran = cli(*words)
    assert ran.code == 130 and "nothing was answered yet" in ran.err
    assert not out.exists(), "there is nothing to keep"


def test_a_mesh_gives_the_same_answers(cli, asked, tmp_path, monkeypatch):
    """Answers, bytes and what is kept, seconds aside, by the programs of a mesh, of one device here."""
    words, out = asked
    alone, loaded = kvjax.load("tiny"), []

    def load(name, mesh=None, **options):
        loaded.append(alone if mesh is None else alone.on(parse_mesh(mesh)))
        return loaded[-1]

    monkeypatch.setattr(kvjax, "load", load)
    assert cli(*words).code == 0 and cli(*words[:-1], str(tmp_path / "mesh"), "--mesh", "data=1").code == 0
    assert [lm.mesh for lm in loaded] == [None, Mesh()]
    one, two = (
        [json.loads(row) for row in (folder / "answers.jsonl").read_text().splitlines()[1:]]
        for folder in (out, tmp_path / "mesh")
    )
    same = ("policy", "item", "text", "tokens", "prompt_tokens", "live_bytes")
    assert [[row[name] for name in same] for row in one] == [[row[name] for name in same] for row in two]


@pytest.mark.slow
def test_best_is_asked_like_any_policy(cli, asked):
    words, out = asked
    ran = cli(*words[: words.index("--policies")], "--policies", "best", *words[words.index("--policies") + 2 :])
    assert ran.code == 0 and "best" in ran.out and (out / "report.json").is_file()


REFUSED = {
    ("--suite", "nothing"): "There is no suite 'nothing'; known are ruler",
    ("--tasks", "niah"): "has no task 'niah'",
    ("--policies", "nothing"): "nothing",
    ("--retained", "1.5"): "--retained holds 1.5",
    ("--limit", "0"): "--limit is 0",
    ("--batch-size", "0"): "--batch-size is 0",
    ("--length", "513"): "The length 513 is beyond the model's context of 512 tokens.",
    ("--data", "no/such"): "--data names no folder: no/such",
    ("--storage", "int3"): "storage",
    ("--seed", "-1"): "--seed is -1",
}


@pytest.mark.parametrize("flag", REFUSED)
def test_what_makes_no_sense_is_one_sentence(cli, asked, flag, monkeypatch):
    words, out = asked
    assert_refused(cli, monkeypatch, [*words, *flag], out, REFUSED[flag])


def test_a_length_that_nobody_typed_is_within_the_models_context(monkeypatch):
    monkeypatch.setattr(kvjax, "load_config", lambda model: toys.tiny_config(max_position=512))
    assert [first_steps.within_context("toy", length) for length in (4096, 100, None)] == [512, 100, None]


def test_missing_text_and_broken_rows_are_one_sentence(cli, asked, data, tmp_path, monkeypatch):
    words, out = asked
    for part in ("essays", "--data DIR"):
        assert_refused(cli, monkeypatch, ["eval", "--suite", "ruler", "--out", str(out)], out, part)
    (tmp_path / "data" / "longbench" / "trec.jsonl").write_text('{"input": "", "context": "", "answers": "x"}\n')
    assert_refused(cli, monkeypatch, words, out, "trec.jsonl, line 1 is no row of this benchmark: answers")
    out.parent.mkdir(parents=True)
    out.write_text("")
    assert "is a file" in cli(*words).sentence


@pytest.mark.slow
def test_short_questions_that_are_scored(cli, tmp_path, monkeypatch):
    rows = [
        {"premise": "It rained.", "choice1": "I stayed.", "choice2": "I left.", "question": "effect", "label": 0}
    ] * 8
    path = tmp_path / "data" / "short" / "copa.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", "--suite", "short", "--tasks", "copa", "--policies", "streamingllm", "--retained", "0.5"]
    out = tmp_path / "out"
    ran = cli(*words, "--data", str(tmp_path / "data"), "--limit", "2", "--out", str(out))
    assert ran.code == 0 and "accuracy by length" in ran.out
    held = json.loads((out / "report.json").read_text())
    assert [cache["answered"] for cache in held["caches"]] == [2, 2]


@pytest.mark.parametrize("answered", [True, False])
def test_ctrl_c_says_what_the_papers_have(cli, tmp_path, monkeypatch, answered):
    def interrupted(self):
        self.journal = SimpleNamespace(answers={"a": "an answer"} if answered else {}, close=lambda: None)
        raise KeyboardInterrupt

    monkeypatch.setattr("kvjax.eval.papers.measured.Measured.run", interrupted)
    monkeypatch.setattr("kvjax.eval.papers.papers_report.write", lambda *_: SimpleNamespace(print=lambda **_: None))
    out = tmp_path / "out"
    ran = cli("eval", "--suite", "papers", "--tasks", "lagkv", "--quick", "--length", "400", "--out", str(out))
    assert ran.code == 130
    assert ("what is answered is in" if answered else "nothing was answered yet") in ran.err


def test_papers_without_a_study(cli, tmp_path):
    out = tmp_path / "out"
    words = ["eval", "--suite", "papers", "--out", str(out)]
    ran = cli(*words, "--tasks", "round", "--quick")
    assert ran.code == 0 and "Round Attention: A Novel Round-Level Attention" in ran.out
    names = sorted(path.name for path in out.iterdir())
    assert names == ["report.html", "report.json", "report.md"] and "Qwen2.5-0.5B" in (out / "report.md").read_text()
    for flags, sentence in (
        (("--tasks", "x"), "has no task 'x'; it has razor, round"),
        (("--in-view",), "leave --in-view out"),
        (("--limit", "0"), "--limit is 0"),
        (("--length", "513"), "The length 513 is beyond the model's context of 512 tokens."),
        (("--policies", "kvzip"), "leave --policies and --retained out"),
        (("--retained", "0.1"), "leave --policies and --retained out"),
    ):
        refused = cli(*words, *flags)
        assert refused.code == 2 and sentence in refused.sentence
