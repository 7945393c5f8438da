"""Compiles this package's C++ for the machine's processor, once, and registers its functions with XLA.

No wheel could hold what is compiled here: it uses the instructions that this processor has, and the headers of the
jaxlib that is installed. So it is made where it is needed, by the C++ compiler that is there, in a few seconds, and
kept beside other compiled programs. A machine without a compiler has XLA's own forms; KVJAX_NATIVE=0 asks for them.
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
import threading
import warnings
from pathlib import Path

import jax
import jaxlib.version

from pallas_kernels import dispatch

_HERE = Path(__file__).parent
#: The functions of each library, which is compiled from the file of its name.
FUNCTIONS = {
    "products": ("kvjax_int8_product", "kvjax_fine_int8_product"),
    "attention": ("kvjax_float_attention", "kvjax_bfloat16_attention", "kvjax_int8_attention"),
}
#: Without -ffast-math: rounding, and what is not finite, are as in XLA's own forms.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-w", "-shared", "-fPIC")
_SECONDS = 120
_registered: dict[str, ctypes.CDLL] = {}
_locks = {name: threading.Lock() for name in FUNCTIONS}


def loaded(name: str) -> ctypes.CDLL | None:
    """A library whose functions XLA knows, compiled at the first call; None where there is none for this machine.

    Args:
      name: "products" or "attention".

    Warns:
      RuntimeWarning: there is a compiler, and it failed, or what it made cannot be kept or loaded.
    """
    if not _wanted():
        return None
    with _locks[name]:
        return _made(name, folder())


def ahead(*names: str) -> None:
    """Compile libraries while other things are done, on a thread of their own."""
    if _wanted() and compiler() is not None and not all(_path(name, folder()).exists() for name in names):
        threading.Thread(target=lambda: [loaded(name) for name in names], name="kvjax-native").start()


def supported() -> bool:
    """Whether the C++ is written for this machine: x86-64, on Linux or macOS."""
    return sys.platform != "win32" and platform.machine().lower() in ("x86_64", "amd64")


def compiler() -> str | None:
    """Path of the C++ compiler: $CXX, or the first of c++, g++ and clang++; None where there is none."""
    names = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    return next((path for name in names if (path := shutil.which(name))), None)


def folder() -> Path:
    """Where libraries are kept: beside compiled programs, in KVJAX_CACHE or the user's cache folder."""
    import platformdirs

    chosen = os.environ.get("KVJAX_CACHE")
    return (Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("kvjax")) / "native"


def command(name: str, out: Path, *more: str) -> list[str] | None:
    """What compiles a library; None where nothing does. Flags that come later win."""
    found = compiler()
    if found is None:
        return None
    return [found, *FLAGS, *more, "-isystem", jax.ffi.include_dir(), str(_HERE / f"{name}.cc"), "-o", str(out)]


def register(name: str, path: Path, suffix: str = "") -> ctypes.CDLL:
    """Give XLA a library's functions, under their names and a suffix.

    XLA takes a name once in a process: a later library of the same name and suffix is not looked at.

    Raises:
      OSError: it cannot be loaded.
    """
    if name + suffix not in _registered:
        library = ctypes.CDLL(str(path))
        for function in FUNCTIONS[name]:
            handler = jax.ffi.pycapsule(getattr(library, function))
            jax.ffi.register_ffi_target(function + suffix, handler, platform="cpu")
        _registered[name + suffix] = library
    return _registered[name + suffix]


@functools.cache
def _made(name: str, folder: Path) -> ctypes.CDLL | None:
    path = _path(name, folder)
    try:
        if not path.exists() and not _build(name, path):
            return None
        return register(name, path)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"The {name} for this CPU could not be compiled into {folder} ({_first_line(said)}); XLA's own are used, "
            "which take up to three times as long.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def _wanted() -> bool:
    off = os.environ.get("KVJAX_NATIVE", "").strip().lower() in ("0", "false", "no", "off")
    return not off and dispatch.platform() == "cpu" and supported()


def _path(name: str, folder: Path) -> Path:
    return folder / f"{name}-{_key(name)}.so"


def _build(name: str, path: Path) -> bool:
    """Compile, whole or not at all: other processes may be doing the same. False without a compiler."""
    if compiler() is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{name}-") as temporary:
        made = Path(temporary) / path.name
        line = command(name, made)
        assert line is not None
        # In a session of its own, where Ctrl-C does not reach it: what it makes is of use to the next process.
        options = {"check": True, "capture_output": True, "text": True, "timeout": _SECONDS}
        subprocess.run(line, start_new_session=True, **options)
        made.replace(path)
    return True


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "nothing was said")[:200]


@functools.cache
def _key(name: str) -> str:
    """Changes with whatever a library is made from: sources, flags, headers and processor."""
    sources = [(_HERE / file).read_text() for file in ("parallel.h", f"{name}.cc")]
    parts = (*sources, " ".join(FLAGS), jaxlib.version.__version__, platform.machine(), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """The processor's name and instructions, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # systems without this file
        return platform.processor()
    return "".join(line for line in dict.fromkeys(lines) if line.startswith(("model name", "flags")))
