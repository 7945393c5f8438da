"""``kvjax eval`` by two processes over one folder; one is killed, or started with another command."""

from __future__ import annotations

import json
import signal

import pytest
from support.benchmarks import write_benchmarks
from support.processes import PATIENCE, Processes, free_port, wait_for
from support.suite_runs import without_times

from kvjax.held_folder import held

FILES = ["answers.jsonl", "report.html", "report.json", "report.md", "scores.png", "tasks.png"]


@pytest.fixture
def processes(tmp_path):
    made = Processes(tmp_path, "eval", devices=1)
    yield made
    made.end()


@pytest.fixture
def asked(tmp_path):
    data = write_benchmarks(tmp_path / "data")
    words = ["--suite", "longbench", "--tasks", "trec,hotpotqa", "--limit", "2", "--data", str(data)]
    return [*words, "--policies", "streamingllm", "--retained", "0.5", "--batch-size", "1"], tmp_path / "out"


def numbers(folder):
    """A report's numbers but for speeds and the time."""
    held = json.loads((folder / "report.json").read_text())
    del held["machine"]
    for cache in held["caches"]:
        for name in [name for name in cache if name.endswith("per_second")]:
            del cache[name]
    return held


@pytest.mark.slow
def test_two_processes_report_what_one_does_though_one_is_killed(processes, asked, cli, tmp_path):
    words, out = asked
    other = out / "answers-process-1.jsonl"
    pair = processes.pair(*words, "--out", str(out))
    wait_for(lambda: other.exists() and len(other.read_bytes().splitlines()) > 1, pair)
    pair[1].send_signal(signal.SIGKILL)
    assert pair[0].wait(PATIENCE) == 0, processes.said(pair[0])
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert cli("eval", *words, "--out", str(tmp_path / "alone")).code == 0
    assert without_times(out / "answers.jsonl") == without_times(tmp_path / "alone" / "answers.jsonl")
    assert numbers(out) == numbers(tmp_path / "alone")


def test_another_command_and_a_run_that_goes_on_are_refused(processes, asked, cli):
    words, out = asked
    with held("--out", out):
        ran = cli("eval", *words, "--out", str(out))
    assert ran.code == 2 and ran.sentence.startswith(f"Another run writes into {out} now")
    port = free_port()
    first, second = (
        processes.start(number, 2, port, *words, "--out", str(out), "--seed", str(number)) for number in range(2)
    )
    assert (second.wait(PATIENCE), first.wait(PATIENCE)) == (2, 1)
    sentence = "Process 1 was started with seed 1, and process 0 with 0; start all with the same command, or"
    assert processes.said(second).startswith(f"kvjax: {sentence}")
    assert "Process 1 of 2 (" in processes.said(first) and f"failed: {sentence}" in processes.said(first)
    assert not out.exists(), "nothing was begun"
