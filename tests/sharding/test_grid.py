"""Every policy on every mesh gives what one device gives; 8 virtual CPU devices in processes of their own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from sharding.grid import CASES, DEFAULT, GRID
from support.devices import asked, printed

from kvjax.policies import registry


@functools.lru_cache(maxsize=2)
def _results(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    found = printed(Path(__file__).with_name("grid.py"), *names)
    return {result["name"]: result for result in found}


def check(result: dict[str, Any]) -> None:
    assert all(result[name] for name in ("tokens", "retained", "seen", "clipped", "rounds")), result
    assert result["off"] < 1e-4, result
    if "grow" not in result["name"]:
        assert result["device_bytes"] == result["planned_bytes"], result
    if result["turn_bytes"] is not None and "rounds" not in result["name"]:
        assert result["turn_bytes"][0] == result["turn_bytes"][1], result


@pytest.mark.parametrize("name", [case.name for case in DEFAULT])
def test_a_mesh_gives_what_one_device_gives(request, name):
    check(_results(tuple(asked(request)))[name])


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
