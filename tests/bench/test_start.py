"""The measurement of a first hour: what it times, what it counts, and how it fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvjax.bench import cold_start, first_hour
from kvjax.errors import KvjaxError


@pytest.mark.slow
def test_a_conversation_and_random_requests_are_counted(tiny_model):
    counted = first_hour.count_programs("streamingllm:window=256")
    assert 2 <= counted.conversation <= 7 and counted.late == 0 and 4 <= counted.requests <= 12


def test_the_first_process_is_apart_and_the_best_of_the_others_counts(monkeypatch):
    asked, seconds = [], iter([(9.0, 7.0), (3.0, 0.1), (2.0, 0.5)] * 5)
    monkeypatch.setattr(
        first_hour, "_seconds", lambda command, programs: asked.append((command, programs)) or next(seconds)
    )
    found = first_hour.measure_seconds("some-model", 2, lambda what: None)
    assert [each.best for each in found] == [2.0] * 5
    assert [each.first for each in found] == [None, None, None, 9.0, 9.0]
    assert [each.best_compiling for each in found] == [0.5] * 5
    assert [each.first_compiling for each in found] == [None, None, None, 7.0, 7.0]
    folders = [programs for _, programs in asked]
    assert len(set(folders)) == 5 and all(len({*folders[i : i + 3]}) == 1 for i in range(0, 15, 3))
    assert "--policy" in asked[9][0] and "--context" in asked[9][0] and "--context" not in asked[12][0]


def test_seconds_of_compiling_are_those_that_the_command_says(tmp_path):
    said = """print('{"outputs": [{"stats": {"compile_seconds": 1.5}}]}')"""
    assert first_hour._seconds([sys.executable, "-c", said, "--json"], tmp_path)[1] == 1.5
    assert first_hour._seconds([sys.executable, "-c", said], tmp_path)[1] is None


def test_a_command_that_fails_is_one_sentence(tmp_path):
    with pytest.raises(KvjaxError, match="failed: no such model"):
        first_hour._seconds([sys.executable, "-c", "import sys; sys.exit('no such model')"], tmp_path)


def test_starting_is_of_the_weights_that_are_asked_for_and_of_a_cache_of_programs(monkeypatch):
    asked = []

    def run(command, env, **_):
        asked.append((command, env))
        said = '{"outputs": [{"stats": {"compile_seconds": 1.5}}]}'
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setenv("KVJAX_COMPILE_CACHE", "0")
    monkeypatch.setattr(cold_start.subprocess, "run", run)
    monkeypatch.setattr(cold_start, "_first_output", lambda command, env: asked.append((command, env)) or 2.5)
    found = cold_start.measure_startup("some-model", "full", dtype="bfloat16", weights="int8", repetitions=1)
    assert (found.cold_compile, found.second_first_token) == (1.5, 2.5) and len(asked) == 3
    for command, env in asked:
        assert command[command.index("--weights") + 1] == "int8"
        assert command[command.index("--dtype") + 1] == "bfloat16"
        assert "KVJAX_COMPILE_CACHE" not in env and env["JAX_COMPILATION_CACHE_DIR"]
