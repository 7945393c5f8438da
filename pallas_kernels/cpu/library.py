"""Compiles this package's C++ for the machine's processor, once, and registers its functions with XLA.

No wheel could hold what is compiled here: it uses the instructions that this processor has, and the headers of the
jaxlib that is installed. So it is made where it is needed, by the C++ compiler that is there, in a few seconds, and
kept beside other compiled programs. A machine without a compiler has XLA's own forms; KVJAX_NATIVE=0 asks for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from pallas_kernels import dispatch

_HERE = Path(__file__).parent
#: The functions of each library, which is compiled from the file of its name.
FUNCTIONS = {
    "products": ("kvjax_int8_product", "kvjax_fine_int8_product"),
    "group_products": ("kvjax_group_product",),
    "float_products": ("kvjax_float_product", "kvjax_float_product_nt"),
    "prefill": ("kvjax_prefill",),
    "attention_mass": ("kvjax_attention_mass",),
    "attention": ("kvjax_attention",),
}
#: Without -ffast-math: what is not finite is as in XLA's own forms.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-w", "-shared", "-fPIC")
#: Of products a sum is not fused with the multiplication before it, which would round another way.
_ROUNDED = ("-ffp-contract=off",)
_FUSED = ("-ffp-contract=fast",)
_MORE: dict[str, tuple[str, ...]] = {
    "products": _ROUNDED,
    "group_products": _ROUNDED,
    "float_products": (),
    "prefill": _FUSED,
    "attention_mass": _FUSED,
    "attention": _FUSED,
}
_SECONDS = 120
_registered: dict[str, ctypes.CDLL] = {}
_locks = {name: threading.Lock() for name in FUNCTIONS}


def loaded(name: str) -> ctypes.CDLL | None:
    """A library whose functions XLA knows, compiled at the first call; None where there is none for this machine.

    Args:
      name: one of :data:`FUNCTIONS`.

    Warns:
      RuntimeWarning: there is a compiler, and it failed, or what it made cannot be kept or loaded.
    """
    if not _wanted():
        return None
    with _locks[name]:
        return _made(name, folder())


def ahead(*names: str) -> None:
    """Compile what is not there yet while other things are done, on a thread of its own."""
    if at_hand() and not all(os.path.exists(_path(name, folder())) for name in names):
        threading.Thread(target=lambda: [loaded(name) for name in names], name="kvjax-native").start()


def at_hand() -> bool:
    """Whether C++ is wanted on the platform compiled for, and there is a compiler that makes it."""
    return _wanted() and compiler() is not None


def supported() -> bool:
    """Whether the C++ is written for this machine: Linux on x86-64 with AVX2."""
    linux = sys.platform == "linux" and platform.machine().lower() in ("x86_64", "amd64")
    return linux and "avx2" in _processor().split()


def compiler() -> list[str] | None:
    """The C++ compiler and its first arguments: $CXX, or the first of c++, g++ and clang++; None without one."""
    chosen: list[str] = []
    with contextlib.suppress(ValueError):  # a quotation without its end is no compiler's name
        chosen = shlex.split(os.environ.get("CXX", ""))
    for line in ([chosen] if chosen else []) + [["c++"], ["g++"], ["clang++"]]:
        if (path := shutil.which(line[0])) is not None:
            return [path, *line[1:]]
    return None


def folder() -> str:
    """Where libraries are kept: beside compiled programs, in KVJAX_CACHE or the user's cache folder."""
    import platformdirs

    chosen = os.environ.get("KVJAX_CACHE")
    return os.path.join(os.path.expanduser(chosen) if chosen else platformdirs.user_cache_dir("kvjax"), "native")


def command(name: str, out: str | Path, *more: str) -> list[str] | None:
    """The command that compiles a library; None where there is no compiler. Flags that come later win."""
    found = compiler()
    if found is None:
        return None
    flags = (*FLAGS, *_MORE[name], *more, "-isystem", jax.ffi.include_dir())
    return [*found, *flags, str(_HERE / f"{name}.cc"), "-o", str(out)]


def register(name: str, path: str | Path, suffix: str = "") -> ctypes.CDLL:
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
def _made(name: str, folder: str) -> ctypes.CDLL | None:
    path = _path(name, folder)
    try:
        if os.path.exists(path):
            with contextlib.suppress(OSError):  # of another system that shares the folder, or damaged: made again
                return register(name, path)
        return register(name, path) if _build(name, path) else None
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"The {name.replace('_', ' ')} for this CPU could not be compiled into {folder} ({_reason(error)}); XLA's "
            "own are used, which take up to eight times as long.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def _wanted() -> bool:
    off = os.environ.get("KVJAX_NATIVE", "").strip().lower() in ("0", "false", "no", "off")
    return not off and dispatch.platform() == "cpu" and supported()


def _path(name: str, folder: str) -> str:
    return os.path.join(folder, f"{name}-{_key(name)}.so")


def _build(name: str, path: str) -> bool:
    """Compile, whole or not at all: other processes may be doing the same. False without a compiler."""
    folder = os.path.dirname(path)
    if compiler() is None:
        return False
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-", ignore_cleanup_errors=True) as temporary:
        made = os.path.join(temporary, os.path.basename(path))
        line = command(name, made)
        assert line is not None
        _run(line)
        os.replace(made, path)
    return True


def _run(line: list[str]) -> None:
    """Run a compiler and what it starts, in a session of their own: Ctrl-C at a terminal is not for them."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    with subprocess.Popen(line, **options) as process:
        try:
            said, _ = process.communicate(timeout=_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, line[0], said)


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    """A compiler's first words about an error, or else what became of it."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"the compiler took more than {_SECONDS} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.output or b"").decode(errors="replace").strip().splitlines()
        return next((one for one in lines if "error" in one), lines[0] if lines else str(error))[:200]
    return str(error)[:200]


@functools.cache
def _key(name: str) -> str:
    """Changes with what a library is made from: sources, flags, headers and processor."""
    sources = [path.read_text() for path in (*sorted(_HERE.glob("*.h")), _HERE / f"{name}.cc")]
    parts = (*sources, *FLAGS, *_MORE[name], jaxlib.version.__version__, platform.machine(), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@functools.cache
def _processor() -> str:
    """The processor's name and instructions, as Linux says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # systems without this file
        return platform.processor()
    return "\n".join(line for line in dict.fromkeys(lines) if line.startswith(("model name", "flags")))
