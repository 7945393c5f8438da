"""Kernels compiled by a TPU's own compiler, where scripts/fetch_libtpu.py has put it; ``make aot`` is every case."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: The kernel as it is and with all its options, one query a head; the smallest of the others; a step that reads scores.
NAMED = r"blocks of 512$|all but logits|^window of 32, G = 3|^chunk of 64|D = 128, int8$|h2o"


@pytest.mark.skipif(not (ROOT / ".libtpu").exists(), reason="no TPU compiler: `python scripts/fetch_libtpu.py`")
def test_kernels_compile_for_a_tpu_within_their_limits(tmp_path):
    """The script ends with 1 when a case fails, spills or takes temporary memory beyond its limits."""
    page = tmp_path / "page.md"
    command = [sys.executable, "-m", "tools.aot", "--tpu-python", sys.executable, "--targets", "v5e"]
    command += ["--named", NAMED, "--out", str(page)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for operation in ("ragged_decode", "attention_mass", "prefill", "append", "pack", "decode step"):
        assert f"## {operation}" in page.read_text()
    assert "| G = 1, D = 128, all but logits, int8 |" in page.read_text()
