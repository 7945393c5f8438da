"""A process that has a platform's compiler: it runs a module of this package there and hands back what that prints."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from scripts.fetch_libtpu import compiler_path

ROOT = Path(__file__).resolve().parents[2]
#: Whoever starts a compiler, tests too, which turn optimisation off for their own programs.
OPTIMISED = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}


def environment(python: str) -> dict[str, str]:
    """The environment of a process that compiles for devices that this machine lacks."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *compiler_path(python)]),
        "JAX_PLATFORMS": "cpu",
        # Else a second process that has libtpu loaded is refused, and the machine's own metadata is asked for.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        **OPTIMISED,
    }


def last_line(python: str, *arguments: str, settings: Mapping[str, str] | None = None) -> str:
    """The last line that ``python arguments`` prints; ends this process with its error where it fails.

    Args:
      settings: further variables of its environment.
    """
    command, variables = [python, *arguments], environment(python) | dict(settings or {})
    ended = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {ended.stderr[-3000:]}")
    return ended.stdout.splitlines()[-1]


def versions(python: str, *packages: str) -> dict[str, str]:
    """The versions of what compiles, of those that are installed there."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({name: found[name] for name in sys.argv[1:] if name in found}))"
    )
    return json.loads(last_line(python, "-c", code, *packages))
