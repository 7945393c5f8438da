"""C++ for CPUs, compiled for this machine's instructions and for older ones."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pallas_kernels.cpu import library

needs_compiler = pytest.mark.skipif(
    not library.supported() or library.compiler() is None, reason="there is no C++ compiler for this machine"
)
needs_shell = pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
needs_native = pytest.mark.skipif(library.loaded("attention") is None, reason="it is switched off, or not there")
#: Flags of each set of instructions.
SETS = {"here": (), "avx2": ("-march=x86-64-v3",)}


@functools.cache
def suffix(name: str, instructions: str) -> str:
    """What the functions of a library for some instructions are called by, after their names; compiled once."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.so"
        line = library.command(name, path, *SETS[instructions])
        assert line is not None
        subprocess.run(line, check=True, capture_output=True)
        library.register(name, path, f"_{instructions}")
    return f"_{instructions}"
