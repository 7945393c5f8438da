"""Runs a test's script in a process of its own, which has virtual CPU devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import quick


def printed(script: Path, *arguments: str, devices: int = 8) -> list[Any]:
    """What a script prints, a line of JSON each."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), str(root / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | quick.on_devices(devices) | {"PYTHONPATH": os.pathsep.join(paths)}
    ended = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


def asked(request: Any, parameter: str = "name") -> list[str]:
    """Names that a test's module is asked for in this run, so that a script computes no others."""
    mine = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    found = (item.callspec.params.get(parameter) for item in mine)
    return list(dict.fromkeys(name for name in found if name is not None))
