"""What is read once, and what is scored, on a mesh: as on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.devices import printed


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=4,model=2", "data=8", "data=2,model=4"])
def test_a_mesh_gives_what_one_device_gives(mesh):
    results = printed(Path(__file__).with_name("asked.py"), mesh)
    assert len(results) == 2
    for result in results:
        assert result["tokens"] and result["off"] < 1e-4 and result["decoded"] < 1e-5, result
