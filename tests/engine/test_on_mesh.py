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
