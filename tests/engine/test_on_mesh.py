"""An engine on meshes: slots divided among the devices of the data axis, heads among those of the model axis."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.on_mesh import MESHES
from support.devices import printed

SCRIPT = Path(__file__).resolve().with_name("on_mesh.py")


@pytest.mark.parametrize("policy", MESHES)
def test_answers_are_those_of_one_device(policy):
    (found,) = printed(SCRIPT, policy)
    assert found["policy"] == policy and found["slots"] == 4
    assert all(found["same"]) and all(found["finished"]), found
    assert found["between"] == "decode_chunk", "a long prompt is left between two layers"


@pytest.mark.parametrize("policy", ["snapkv:ratio=0.5", pytest.param("full", marks=pytest.mark.slow)])
def test_slots_share_a_context_wherever_it_was_read(policy):
    (found,) = printed(SCRIPT, "--context", policy)
    assert all(found["same"]) and found["smaller"], found
    shared, whole = found["shared"]
    assert 0 < shared < whole, "each device holds its heads' part of the context"
