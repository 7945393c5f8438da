"""An engine on meshes: slots divided among the devices of the data axis, heads among those of the model axis."""

from __future__ import annotations

from pathlib import Path

from support.devices import printed

SCRIPT = Path(__file__).resolve().with_name("on_mesh.py")


def test_answers_are_those_of_one_device():
    found = printed(SCRIPT)
    assert [line["slots"] for line in found] == [4, 4]
    for line in found:
        assert all(line["same"]) and all(line["finished"]), line
