"""The part of its device's memory that this process may take, and what decides it.

On a GPU it is not the device's memory: JAX takes a part of it, three quarters unless an environment variable says
otherwise, and reserves that part when the process first uses the GPU, unless another one says otherwise.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax.checks import MOST_BYTES, number, read_number, whole_number
from kvjax.errors import UsageError, quoted
from kvjax.tables import human_bytes

#: What JAX takes of a GPU when nobody says.
_FRACTION = 0.75
#: The most that leaves room for what CUDA itself needs.
_LARGEST = 0.95
#: How JAX is told to take it.
LARGEST_SETTING = f"XLA_PYTHON_CLIENT_MEM_FRACTION={_LARGEST} before Python starts"


@dataclasses.dataclass(frozen=True)
class GpuMemory:
    """The part of a GPU's memory that JAX may take.

    Attributes:
      limit: bytes, or None where its allocator knows no limit.
      fraction: of the GPU's memory.
      preallocated: whether that was reserved when the process began to use the GPU.
    """

    limit: int | None
    fraction: float
    preallocated: bool

    @property
    def total(self) -> int:
        """About the GPU's memory."""
        return round((self.limit or 0) / self.fraction)

    @property
    def source(self) -> str:
        """The source of the limit, as a clause."""
        if self.limit is None:
            return "JAX's allocator (XLA_PYTHON_CLIENT_ALLOCATOR) does not say how much there is; memory_limit does"
        how = "reserves" if self.preallocated else "takes as it is needed, beside other programs,"
        return f"JAX {how} {self.fraction:.0%} of the GPU's {human_bytes(self.total)} (XLA_PYTHON_CLIENT_MEM_FRACTION)"

    def offer(self, need: int) -> str | None:
        """The setting with which ``need`` bytes fit, if any part of the GPU would do."""
        if self.limit is None or self.fraction >= _LARGEST or need > self.total * _LARGEST:
            return None
        return LARGEST_SETTING

    @property
    def largest(self) -> int | None:
        """Bytes with the largest part that JAX may be told to take; None where it already takes that."""
        return None if self.limit is None or self.fraction >= _LARGEST else int(self.total * _LARGEST)


def gpu_memory() -> GpuMemory | None:
    """The part of this process's first GPU that JAX may take, or None where the default device is none."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return None
    fraction, preallocated = _settings()
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return GpuMemory(limit or None, fraction, preallocated)


def named_gpu(memory: int) -> GpuMemory:
    """The part that JAX would take of a GPU of so many bytes, by this process's settings."""
    fraction, preallocated = _settings()
    return GpuMemory(int(memory * fraction), fraction, preallocated)


def _settings() -> tuple[float, bool]:
    """The part of a GPU's memory that JAX takes, and whether it reserves it, by the environment.

    Raises:
      UsageError: the part is no number above 0.
    """
    # As jaxlib reads them; it refuses both names of the fraction together.
    fraction = _FRACTION
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if text := os.environ.get(name):
            try:
                number(name, fraction := read_number(text), 0, open_below=True)
            except ValueError as error:
                raise UsageError(
                    f"The environment variable {name} is {quoted(text)}; give a number above 0, such as {_FRACTION}."
                ) from error
            break
    preallocate = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in ("false", "False", "0")
    own_pool = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower() in ("default", "bfc")
    return fraction, preallocate and own_pool


def agreed_limit(devices: Sequence[Any]) -> int | None:
    """The least :func:`device_limit` of all processes where each has some of JAX's ``devices``; all of them call it.

    Sizes that each chose by its own limit could differ, and they would wait for each other for ever. None where no
    process says, where one has all of the devices, and where some process has none.
    """
    processes = {device.process_index for device in devices}
    if len(processes) == 1 or len(processes) < jax.process_count():
        return None
    from jax.experimental import multihost_utils

    limit, unknown = device_limit(None), np.iinfo(np.int32).max
    mebibytes = np.int32(unknown if limit is None else limit >> 20)  # JAX has no wider integers
    least = int(np.min(multihost_utils.process_allgather(mebibytes)))
    return None if least == unknown else least << 20


def device_limit(memory_limit: int | None) -> int | None:
    """Bytes this process may take of the default device, or None when it does not say; ``memory_limit`` if given."""
    if memory_limit is not None:
        whole_number("memory_limit", memory_limit, 1, MOST_BYTES)
        return int(memory_limit)
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        import psutil

        return int(psutil.virtual_memory().total)
    gpu = gpu_memory()
    return (device.memory_stats() or {}).get("bytes_limit") if gpu is None else gpu.limit
