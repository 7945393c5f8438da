"""Facts about the machine that a measurement depends on: memory bandwidth, peak memory, versions."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import psutil
from jax import Array


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """Fastest read of device memory seen.

    Attributes:
      bytes_per_second: the best over all forms and repetitions.
      buffer_bytes: size of the buffer read, far beyond any cache of the processor.
      forms: best bytes per second of each form.
    """

    bytes_per_second: float
    buffer_bytes: int
    forms: dict[str, float]


# Reductions that read every byte once and write almost nothing. Which one XLA compiles best differs by device
# (2 CPU cores: 43 to 53 GB/s), so the best of them counts: the limit must not flatter the shares reported against it.
_FORMS: dict[str, Callable[[Array], Array]] = {
    "sum": lambda x: x.sum(),
    "row sums": lambda x: x.sum(axis=1),
    "matrix-vector product": lambda x: x @ jnp.ones((x.shape[1],), x.dtype),
}


def measure_bandwidth(repetitions: int = 5, buffer_bytes: int | None = None) -> Bandwidth:
    """Read a buffer of 1 GiB (less on a host with under 8 GB) with jitted reductions; best of several of each form."""
    if buffer_bytes is None:
        buffer_bytes = min(2**30, psutil.virtual_memory().total // 8)
    columns = 16384
    x = jnp.ones((max(1, buffer_bytes // (4 * columns)), columns), jnp.float32)
    forms = {}
    for name, form in _FORMS.items():
        compiled = jax.jit(form)
        compiled(x).block_until_ready()
        seconds = []
        for _ in range(repetitions):
            start = time.perf_counter()
            compiled(x).block_until_ready()
            seconds.append(time.perf_counter() - start)
        forms[name] = x.nbytes / min(seconds)
    return Bandwidth(max(forms.values()), x.nbytes, forms)


def faster(first: Bandwidth, second: Bandwidth) -> Bandwidth:
    """The better of two measurements, so that a busy moment does not lower the limit."""
    return first if first.bytes_per_second >= second.bytes_per_second else second


class PeakMemory:
    """Highest memory in use while it was watched, and where it started; bytes, set when the watch ends."""

    start: int = 0
    peak: int = 0

    @property
    def added(self) -> int:
        return max(0, self.peak - self.start)


@contextlib.contextmanager
def watch_peak() -> Iterator[PeakMemory]:
    """Watch the process's resident memory (sampled each millisecond), or the accelerator's own high-water mark."""
    watched = PeakMemory()
    device_stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in device_stats:
        # The device's mark cannot be reset: a case that stays below an earlier one reports the earlier one's peak.
        watched.start = device_stats["bytes_in_use"]
        yield watched
        watched.peak = (jax.local_devices()[0].memory_stats() or device_stats)["peak_bytes_in_use"]
        return
    process, done = psutil.Process(), threading.Event()
    watched.start = watched.peak = process.memory_info().rss

    def sample() -> None:
        while not done.wait(0.001):
            watched.peak = max(watched.peak, process.memory_info().rss)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield watched
    finally:
        done.set()
        sampler.join()
        watched.peak = max(watched.peak, process.memory_info().rss)


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


def describe() -> dict[str, Any]:
    """Versions, machine and date, so that a saved result can be judged later."""
    packages = ("kvjax", "jax", "jaxlib", "flax", "torch", "transformers")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in packages},
        "device": jax.devices()[0].device_kind,
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
