"""A mesh over two processes gives what the same mesh in one process gives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import quick

PATIENCE = 300


def _run(policy: str, processes: int, *model: str) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = (
        os.environ
        | quick.on_devices(8 // processes)
        | {
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        }
    )
    script = str(Path(__file__).with_name("hosts.py"))
    started = [
        subprocess.Popen(
            [sys.executable, script, str(port), str(processes), str(number), policy, *model],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(processes)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=PATIENCE) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, log) in zip(started, ended, strict=True):
        assert process.returncode == 0, log[-4000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


def _check_alike(policy: str, *model: str) -> None:
    (alone,) = _run(policy, 1, *model)
    for found in _run(policy, 2, *model):
        assert found["weights"] == [0.25] * 4
        for (tokens, logprobs, retained), (want, want_logprobs, want_retained) in zip(
            found["said"], alone["said"], strict=True
        ):
            assert tokens == want and retained == want_retained
            np.testing.assert_allclose(logprobs, want_logprobs, atol=1e-4 if model else 1e-5)
        assert found.get("bytes") == alone.get("bytes")


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "lagkv:ratio=0.5,lag=8,sink=4",
        "round:watershed=1,top=0.5",
        "round:watershed=1,top=0.5,granularity=token",
    ],
)
def test_two_hosts_converse_as_one(policy):
    _check_alike(policy)


@pytest.mark.slow
def test_two_hosts_load_a_model_onto_their_own_devices(default_model):
    _check_alike("lagkv:ratio=0.5,lag=8,sink=4", "smollm2-135m-instruct")


@pytest.mark.slow
def test_rounds_stay_on_their_host():
    (alone,) = _run("round:watershed=1,top=0.5", 1)
    assert alone["here"] == [4, 4, 4] and "refused" not in alone
    first, second = _run("round:watershed=1,top=0.5", 2)
    assert first["here"] == [4, 4, 4] and second["here"] == [0, 0, 0]
    assert first["refused"] == second["refused"] and "in another host's memory" in first["refused"]
