"""Compiles ``products.cc`` for this machine's processor, once, and registers its functions with XLA.

No wheel could hold what is compiled here: it uses the instructions that this processor has, and the headers of the
jaxlib that is installed. So it is made where it is needed, by the C++ compiler that is there, in about four seconds,
and kept in a folder; a machine without a compiler has XLA's own products.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import jax
import jaxlib.version

SOURCE = Path(__file__).with_name("products.cc")
FUNCTIONS = ("kvjax_int8_product", "kvjax_fine_int8_product")
#: Without -ffast-math: rounding, and what is not finite, are as in XLA's own form.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-w", "-shared", "-fPIC")
_SECONDS = 120
_registered: dict[str, int] = {}


def compiler() -> str | None:
    """Path of the C++ compiler: $CXX, or the first of c++, g++ and clang++; None where there is none."""
    names = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    return next((path for name in names if (path := shutil.which(name))), None)


@functools.cache
def most_rows(folder: Path) -> int:
    """Rows of activations up to which the registered functions are faster than XLA's products; 0 without functions.

    Args:
      folder: where the library is, or is made, which happens at the first call.

    Warns:
      RuntimeWarning: there is a compiler, and it failed, or what it made cannot be kept or loaded.
    """
    if sys.platform == "win32" or platform.machine().lower() not in ("x86_64", "amd64"):
        return 0
    path = folder / f"products-{_key()}.so"
    try:
        if not path.exists() and not _build(path):
            return 0
        return register(path)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"Products for this CPU could not be made in {folder} ({_first_line(said)}); XLA's own are used, "
            "which take two to three times as long.",
            RuntimeWarning,
            stacklevel=2,
        )
        return 0


def register(path: Path, suffix: str = "") -> int:
    """Give XLA a library's functions, under their names and a suffix; its rows as of :func:`most_rows`.

    XLA takes a name once in a process: a later library of the same suffix is not looked at.

    Raises:
      OSError: it cannot be loaded.
    """
    if suffix not in _registered:
        library = ctypes.CDLL(str(path))
        for name in FUNCTIONS:
            jax.ffi.register_ffi_target(name + suffix, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
        library.kvjax_most_rows.restype = ctypes.c_int64
        _registered[suffix] = library.kvjax_most_rows()
    return _registered[suffix]


def command(source: Path, out: Path, *more: str) -> list[str] | None:
    """What compiles the library; None where nothing does. Flags that come later win."""
    found = compiler()
    if found is None:
        return None
    return [found, *FLAGS, *more, "-isystem", jax.ffi.include_dir(), str(source), "-o", str(out)]


def _build(path: Path) -> bool:
    """Compile, whole or not at all: other processes may be doing the same."""
    line = command(SOURCE, path)
    if line is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".products-") as temporary:
        made = Path(temporary) / path.name
        line[-1] = str(made)
        subprocess.run(line, check=True, capture_output=True, text=True, timeout=_SECONDS)
        made.replace(path)
    return True


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "nothing was said")[:200]


def _key() -> str:
    """Changes with whatever the library is made from: source, flags, headers and processor."""
    parts = (SOURCE.read_text(), " ".join(FLAGS), jaxlib.version.__version__, platform.machine(), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """The processor's name and instructions, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # systems without this file
        return platform.processor()
    return "".join(line for line in dict.fromkeys(lines) if line.startswith(("model name", "flags")))
