"""Put the TPU compiler that this environment's JAX asks for in ``.libtpu``, beside the environment and not in it: with
libtpu installed, JAX would look for a TPU at every start. No TPU is needed to compile for one.

    python scripts/fetch_libtpu.py
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / ".libtpu"


def compiler_path(python: str) -> list[str]:
    """The entries for a process' PYTHONPATH with which this Python finds the folder's compiler: none for another
    Python, whose JAX may ask for another version, nor for one that has its own installed."""
    return [str(FOLDER)] if python == sys.executable and importlib.util.find_spec("libtpu") is None else []


def wanted() -> str:
    """The requirements of ``jax[tpu]`` beside jax itself, such as ``libtpu==0.0.42.*``."""
    required = importlib.metadata.requires("jax") or []
    (found,) = (line.partition(";")[0].strip() for line in required if line.startswith("libtpu"))
    return found


def main() -> None:
    """See the module's docstring; does nothing where the folder holds it already, or where it does not run."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print("The TPU compiler runs on 64-bit x86 Linux alone; tests that need it are skipped here.")
        return
    made = FOLDER / wanted().replace("*", "x")
    if made.exists():
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(FOLDER), wanted()], check=True)
    made.touch()


if __name__ == "__main__":
    main()
