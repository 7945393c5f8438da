"""Jobs of two processes with four virtual devices each, found on the loopback interface; some of them die."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.batch_rows import contents, prompts, records, write_rows
from support.processes import PATIENCE, Processes, free_port, wait_for


@pytest.fixture
def processes(tmp_path):
    made = Processes(tmp_path, "batch")
    yield made
    made.end()


#: JAX takes the coordinator's port from a job's number: one of these, so many after the first.
LAUNCHER_PORTS, LAUNCHER_PORT = 2**12, 65536 - 2**12


def slurm(job: int) -> Callable[[int], dict[str, str]]:
    """What ``srun -n 2`` tells each process."""
    common = {"SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    return lambda number: common | {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}


def open_mpi(job: int) -> Callable[[int], dict[str, str]]:
    """What ``mpirun -n 2`` tells each process."""
    common = {"OMPI_MCA_orte_hnp_uri": f"{job * 2**12}.0;tcp://127.0.0.1:1", "OMPI_COMM_WORLD_SIZE": "2"}
    return lambda number: common | {"OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_LOCAL_RANK": str(number)}


def answers(folder: Path) -> dict[str, bytes]:
    """All files but the manifest: this process compiles the toy's random weights without optimising, to other bits."""
    assert json.loads((folder / "manifest.json").read_text())["state"] == "finished"
    return {name: data for name, data in contents(folder).items() if name != "manifest.json"}


def job(folder: Path, count: int, *more: str) -> tuple[str, ...]:
    rows = [{"prompt": text[:40], "id": f"q{i}"} for i, text in enumerate(prompts(count, seed=2))]
    rows[count // 2] = {"prompt": ""}
    path = write_rows(folder / "in.jsonl", rows)
    size = ("--max-new-tokens", "6", "--batch-size", "4", "--shard-rows", "8")
    return "--input", str(path), "--output", str(folder / "out"), *size, *more


def test_two_processes_write_what_one_does_though_one_is_killed(processes, run, tmp_path):
    arguments = job(tmp_path, 60)
    out = tmp_path / "out"
    pair = processes.pair(*arguments, "--mesh", "data=4,model=2")
    wait_for(lambda: len(list(out.glob("part-*"))) >= 2, pair)
    os.kill(pair[1].pid, signal.SIGKILL)
    begun = time.monotonic()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert pair[0].wait(PATIENCE) == 0, processes.said(pair[0])
    assert time.monotonic() - begun < PATIENCE / 2
    assert 2 <= len(before) < 8
    assert before.items() <= {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}.items()
    assert "process 1 lost, whose prompts the others answered" in processes.said(pair[0])
    _, single = run(tmp_path / "in.jsonl", "single", shard_rows=8)
    assert answers(out) == answers(single)


@pytest.mark.slow
def test_a_job_that_lost_process_0_goes_on_at_the_next_start(processes, run, tmp_path):
    arguments = job(tmp_path, 60)
    out = tmp_path / "out"
    pair = processes.pair(*arguments)
    wait_for(lambda: len(list(out.glob("part-*"))) >= 2, pair)
    os.kill(pair[0].pid, signal.SIGKILL)
    assert pair[1].wait(PATIENCE) != 0, "nobody keeps what is claimed"
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    pair = processes.pair(*arguments)
    assert [process.wait(PATIENCE) for process in pair] == [0, 0], processes.said(pair[0])
    assert before.items() <= {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}.items()
    assert "kvjax batch: " in processes.said(pair[0]) and "answered" in processes.said(pair[0])
    assert "kvjax" not in processes.said(pair[1]), "process 0 tells what all did"
    _, single = run(tmp_path / "in.jsonl", "single", shard_rows=8)
    assert answers(out) == answers(single)


@pytest.mark.slow
def test_a_failing_process_ends_the_others_with_its_sentence(processes, tmp_path):
    arguments = job(tmp_path, 8)
    port = free_port()
    first = processes.start(0, 2, port, *arguments)
    other = processes.start(1, 2, port, "--input", str(tmp_path / "missing.jsonl"), *arguments[2:])
    assert other.wait(PATIENCE) == 2 and first.wait(PATIENCE) == 1
    assert processes.said(other) == f"kvjax: --input names no file: {tmp_path / 'missing.jsonl'}.\n"
    (sentence,) = processes.said(first).splitlines()
    assert sentence.startswith("kvjax: Process 1 of 2 (") and "failed: --input names no file" in sentence
    assert not (tmp_path / "out" / "part-00000-of-00001.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [slurm, open_mpi])
def test_a_launcher_tells_who_there_is(launcher, processes, tmp_path):
    """Without a flag of the command: what JAX reads of SLURM's and Open MPI's variables is enough."""
    half = LAUNCHER_PORTS // 2
    number = free_port(LAUNCHER_PORT + os.getpid() % half, half) - LAUNCHER_PORT
    pair = processes.told(launcher(number), *job(tmp_path, 16))
    assert [process.wait(PATIENCE) for process in pair] == [0, 0], processes.said(pair[0])
    assert [record["row"] for record in records(tmp_path / "out")] == list(range(16))
    assert "kvjax batch: 15 answered" in processes.said(pair[0])
    assert "kvjax" not in processes.said(pair[1]), "each took itself for the only one"


@pytest.mark.slow
def test_a_thousand_prompts_killed_again_and_again(processes, run, tmp_path):
    """Either process, or both, die at random moments of eight runs, on one device each or on all eight; then the job is
    as if nothing had happened."""
    arguments = job(tmp_path, 1000)
    seed = int(time.time())
    print(f"seed {seed}")  # pytest shows it when the test fails
    out, rng = tmp_path / "out", random.Random(seed)
    kept: dict[str, int] = {}
    for attempt in range(8):
        pair = processes.pair(*arguments, *rng.choice([(), ("--mesh", "data=8,model=1"), ("--mesh", "data=4,model=2")]))
        goal = len(list(out.glob("*"))) + rng.randrange(1, 12)
        wait_for(lambda goal=goal: len(list(out.glob("*"))) >= goal, pair)
        time.sleep(rng.random())
        for process in rng.choice([pair[:1], pair[1:], pair]):
            process.kill()
        for process in pair:
            process.wait(PATIENCE)
        now = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
        assert kept.items() <= now.items(), f"attempt {attempt} touched a finished shard"
        kept = now
    pair = processes.pair(*arguments, "--mesh", "data=4,model=2")
    assert [process.wait(PATIENCE) for process in pair] == [0, 0], processes.said(pair[0])
    assert [record["row"] for record in records(out)] == list(range(1000))
    _, single = run(tmp_path / "in.jsonl", "single", shard_rows=8)
    assert answers(out) == answers(single)


def seconds_of_shards(folder: Path) -> float:
    """From the first shard that was there to the last one; what starting and compiling took does not count."""
    times = sorted(path.stat().st_mtime_ns for path in folder.glob("part-*"))
    return (times[-1] - times[0]) / 1e9


@pytest.mark.slow
def test_a_process_that_is_three_times_slower_answers_fewer(processes, tmp_path):
    """It runs a third of the time. Equal shares would take three times as long, and the ideal takes 1.5 times."""
    seconds = {}
    for name, slow in (("even", False), ("uneven", True)):
        folder = tmp_path / name
        folder.mkdir()
        rows = [{"prompt": text[:40]} for text in prompts(1000, seed=2)]
        path = write_rows(folder / "in.jsonl", rows)
        size = ("--max-new-tokens", "32", "--batch-size", "4", "--shard-rows", "8", "--policy", "lagkv:ratio=0.5,lag=8")
        pair = processes.pair("--input", str(path), "--output", str(folder / "out"), *size)
        wait_for(lambda out=folder / "out": len(list(out.glob("part-*"))) >= 4, pair)
        while slow and pair[1].poll() is None:
            pair[1].send_signal(signal.SIGSTOP)
            time.sleep(0.1)
            pair[1].send_signal(signal.SIGCONT)
            time.sleep(0.05)
        assert [process.wait(PATIENCE) for process in pair] == [0, 0], processes.said(pair[0])
        seconds[name] = seconds_of_shards(folder / "out")
    print(seconds)
    assert seconds["uneven"] < 1.5 * seconds["even"] * 1.15
