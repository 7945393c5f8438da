"""Every family gives on a mesh what it gives on one device: run by ``pytest -m slow``."""

from __future__ import annotations

from pathlib import Path

import pytest
from sharding import families
from support.devices import printed


@pytest.fixture(scope="module")
def results():
    return {each["name"]: each for each in printed(Path(__file__).with_name("families.py"))}


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in families.CASES])
def test_two_by_two_devices_give_what_one_gives(results, name):
    assert results[name]["tokens"], results[name]
    assert results[name]["off"] < 1e-4, results[name]
