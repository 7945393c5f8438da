"""Facts about the machine that a measurement depends on: memory bandwidth, peak memory, versions."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import importlib.metadata
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import psutil
from jax import Array

from kvjax import version
from kvjax.tables import human_bytes
from pallas_kernels.cpu import library

# Reductions that read every byte once and write almost nothing. Which one XLA compiles best differs by device and by
# the minute (2 CPU cores: 43 to 53 GB/s on a quiet machine), so the best of them counts: the limit must not flatter
# the fractions reported against it.
_FORMS: dict[str, Callable[[Array], Array]] = {
    "sum": lambda x: x.sum(),
    "row sums": lambda x: x.sum(axis=1),
    "matrix-vector product": lambda x: x @ jnp.ones((x.shape[1],), x.dtype),
}


class BandwidthMeter:
    """Reads a buffer far beyond any cache of the processor with jitted reductions.

    Attributes:
      buffer_bytes: size of the buffer: 1 GiB, or an eighth of a host's memory when that is less.
      readings: bytes per second, one for each call.
    """

    def __init__(self, buffer_bytes: int | None = None):
        size = min(2**30, psutil.virtual_memory().total // 8) if buffer_bytes is None else buffer_bytes
        columns = 16384
        self._buffer = jnp.ones((max(1, size // (4 * columns)), columns), jnp.float32)
        self._compiled = [jax.jit(form).lower(self._buffer).compile() for form in _FORMS.values()]
        self.buffer_bytes = self._buffer.nbytes
        self.readings: list[float] = []
        self()
        self.readings.clear()  # the first reading pays for waking the threads

    def __call__(self, repetitions: int = 3) -> float:
        """Bytes per second now: the best form's median over the repetitions; also kept in ``readings``.

        A median, because what it is compared with is the mean of many steps: on a shared machine the best of a few
        readings is a moment that no half second of steps has.
        """
        seconds = [statistics.median(self._seconds(form) for _ in range(repetitions)) for form in self._compiled]
        self.readings.append(self.buffer_bytes / min(seconds))
        return self.readings[-1]

    def _seconds(self, form: Callable[[Array], Array]) -> float:
        start = time.perf_counter()
        form(self._buffer).block_until_ready()
        return time.perf_counter() - start


def release_freed_memory() -> None:
    """Hand memory that was freed back to the system, so that resident memory says what is in use (glibc keeps it)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if platform.system() == "Linux" else None
    if trim is not None:
        trim(0)


class PeakMemory:
    """Highest memory in use while it was watched, bytes; set when the watch ends."""

    peak: int = 0


def memory_in_use() -> int:
    """Bytes the accelerator has handed out, or the process's resident memory on a CPU, without what was freed."""
    release_freed_memory()
    return _in_use()


def _in_use() -> int:
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["bytes_in_use"] if "bytes_in_use" in stats else psutil.Process().memory_info().rss


@contextlib.contextmanager
def watch_peak() -> Iterator[PeakMemory]:
    """Watch the memory in use, sampled each millisecond: marks kept by devices cannot be reset between cases."""
    watched, done = PeakMemory(), threading.Event()
    watched.peak = memory_in_use()

    def sample() -> None:
        while not done.wait(0.001):
            watched.peak = max(watched.peak, _in_use())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield watched
    finally:
        done.set()
        sampler.join()
        watched.peak = max(watched.peak, _in_use())


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def sentence(facts: dict[str, Any]) -> str:
    """The facts of :func:`describe` in a clause for a table's footnote."""
    versions = facts["versions"].items()
    named = ", ".join(f"{name} {version}" for name, version in versions if version and name != "jaxlib")
    processor = f"{facts['processor']}, {facts['cores']} cores, {human_bytes(facts['memory_bytes'])}"
    forms = f", CPU kernels in {facts['cpu_forms']}" if facts.get("cpu_forms") else ""
    return f"{processor}{forms}; Python {facts['python']}, {named}; {facts['date'][:10]}"


def describe() -> dict[str, Any]:
    """Versions, machine and date, so that a saved result can be judged later."""
    packages = ("jax", "jaxlib", "flax", "torch", "transformers", "llama-cpp-python")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {"kvjax": version.__version__} | {package: _version(package) for package in packages},
        "device": jax.devices()[0].device_kind,
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "cpu_forms": _cpu_forms(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def _cpu_forms() -> str | None:
    """The form that decode attention takes on a CPU: C++ or XLA."""
    if jax.default_backend() != "cpu":
        return None
    return "XLA" if library.loaded("attention") is None else "C++"


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
