"""A block feature is written once, in the decoder: on a mesh it gives what it gives on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from sharding import block_features
from support.devices import asked, printed


@pytest.fixture(scope="module")
def results(request):
    return {each["name"]: each for each in printed(Path(__file__).with_name("block_features.py"), *asked(request))}


@pytest.mark.parametrize("name", [*block_features.CASES])
def test_a_mesh_gives_what_one_device_gives(results, name):
    assert results[name]["tokens"], results[name]
    # Devices round the channels that they have of a token's activations, each with a scale of its own.
    assert results[name]["off"] < (0.05 if "weights" in block_features.CASES[name] else 1e-4), results[name]
