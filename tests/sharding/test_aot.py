"""A model on meshes of TPUs, compiled where a TPU's compiler is (scripts/fetch_libtpu.py): no hardware is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBTPU = ROOT / ".libtpu"


@pytest.mark.slow
@pytest.mark.skipif(not LIBTPU.exists(), reason="no TPU compiler: `python scripts/fetch_libtpu.py` puts one in .libtpu")
@pytest.mark.parametrize(("layers", "cases"), [(2, "0"), (32, "0,1,2,3,4,5")])
def test_tpu_programs_take_what_is_planned(layers, cases, tmp_path):
    """The script ends with 1 when memory is not the plan's, or when a cache or a round goes where it should not."""
    command = [sys.executable, "-m", "tools.aot.mesh"]
    command += ["--layers", str(layers), "--cases", cases, "--out", str(tmp_path / "page.md")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    page = (tmp_path / "page.md").read_text()
    assert f"{layers} layers" in page and "| v5e:4x4 | 2 x 8 | one round to the device |" in page
