"""C++ for CPUs, compiled for this machine's instructions and for older ones."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

from pallas_kernels.cpu import library

needs_compiler = pytest.mark.skipif(
    not library.supported() or library.compiler() is None, reason="there is no C++ compiler for this machine"
)
needs_shell = pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
needs_native = pytest.mark.skipif(library.loaded("attention") is None, reason="it is switched off, or not there")
#: Flags of each set of instructions.
SETS = {"here": (), "avx2": ("-march=x86-64-v3",)}


@st.composite
def chunk_sizes(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of a chunk of queries at any places, among them none that see a key, with kept tokens or without."""
    heads, rows = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, keys = draw(st.integers(1, 150)), 64 * draw(st.integers(1, 6))
    return {
        "offset": tuple(draw(st.integers(-queries, keys - queries)) for _ in range(rows)),
        "queries": queries,
        "keys": keys,
        "heads": heads,
        "group": draw(st.integers(1, 9)),
        "head_dim": draw(st.sampled_from([16, 48, 64, 80, 128])),
        "dtype": draw(st.sampled_from([jnp.float32, jnp.bfloat16])),
        "kept": draw(st.one_of(st.just(()), st.tuples(*[st.integers(0, 128)] * (heads * rows)))),
        "window": draw(st.sampled_from([None, 1, 20, 140])),
        "soft_cap": draw(st.sampled_from([None, 3.0])),
    }


@functools.cache
def suffix(name: str, instructions: str) -> str:
    """What the functions of a library for some instructions are called by, after their names; compiled once."""
    if not SETS[instructions] and library.loaded(name) is not None:
        return ""  # the one that users get
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.so"
        line = library.command(name, path, *SETS[instructions])
        assert line is not None
        subprocess.run(line, check=True, capture_output=True)
        library.register(name, path, f"_{instructions}")
    return f"_{instructions}"
