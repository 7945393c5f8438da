"""Every policy on every mesh gives what one device gives; 8 virtual CPU devices in processes of their own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sharding.grid import CASES, DEFAULT, GRID

from kvjax.policies import registry

# Compiled without optimisation, as each program runs a few times: half the time, and the results are compared alike.
_XLA = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


def ran(script: Path, *arguments: str) -> list[dict[str, Any]]:
    """What a script of this folder prints, a line of JSON each, on 8 devices."""
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"XLA_FLAGS": _XLA, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    ended = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


@functools.lru_cache(maxsize=2)
def _results(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    found = ran(Path(__file__).with_name("grid.py"), *names)
    return {result["name"]: result for result in found}


def check(result: dict[str, Any]) -> None:
    assert all(result[name] for name in ("tokens", "retained", "seen", "clipped", "rounds")), result
    assert result["off"] < 1e-4, result
    if "grow" not in result["name"]:
        assert result["device_bytes"] == result["planned_bytes"], result


@pytest.mark.parametrize("name", [case.name for case in DEFAULT])
def test_a_mesh_gives_what_one_device_gives(name):
    check(_results(tuple(case.name for case in DEFAULT))[name])


def test_the_grid_has_every_policy():
    known = {case.policy for case in GRID}
    assert {name for name, policy in registry().items() if not policy.offloads_rounds} <= known and "rounds" in known
    assert len(CASES) == len({case.name for case in (*DEFAULT, *GRID)})


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted({case.policy for case in GRID}))
def test_every_policy_on_every_mesh(policy):
    names = tuple(case.name for case in GRID if case.policy == policy)
    for result in _results(names).values():
        check(result)
