"""Accelerators by name, with the memory that JAX has of each: for plans of machines that are not this one."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax

from kvjax.device_memory import GpuMemory, named_gpu
from kvjax.errors import UsageError, quoted

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, as JAX counts them.

    Attributes:
      title: its maker's name of it.
      memory: bytes that a program may have of it: of a GPU what CUDA reports, less than is printed on the box; of a TPU
        what its compiler allows.
      platform: "gpu", of which JAX takes a part, or "tpu".
      bfloat16: whether it multiplies bfloat16.
    """

    title: str
    memory: int
    platform: Literal["gpu", "tpu"] = "tpu"
    bfloat16: bool = True

    @property
    def dtype(self) -> str:
        """The dtype that weights are loaded in there by default; see ``default_dtype`` in ``checkpoints/fill.py``."""
        return "bfloat16" if self.bfloat16 else "float32"

    @property
    def dtype_note(self) -> str | None:
        """A sentence on a dtype that takes half the memory, where the default does not."""
        if self.bfloat16:
            return None
        return "Weights and cache are float32 there by default; --dtype float16 takes half the memory."

    @property
    def gpu(self) -> GpuMemory | None:
        """The part that JAX takes of a GPU, by this process's settings; None of a TPU, which it has whole."""
        return named_gpu(self.memory) if self.platform == "gpu" else None

    @property
    def limit(self) -> int:
        """Bytes that JAX may take."""
        gpu = self.gpu
        return self.memory if gpu is None or gpu.limit is None else gpu.limit

    @property
    def source(self) -> str:
        """The source of the limit, as a clause."""
        gpu = self.gpu
        return f"{self.title}, " + (gpu.source if gpu else "all of which JAX may take")

    def compiled_for(self) -> AbstractContextManager[Any]:
        """Sizes that depend on the platform (pages, blocks) are the chip's, within a ``with``."""
        device = jax.sharding.AbstractDevice(device_kind=self.title, platform=self.platform, num_cores=None)
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def _gib(count: float) -> int:
    return int(count * _GIB)


#: By the names of ``kvjax plan --device``.
CHIPS = {
    "t4": Chip("NVIDIA T4", _gib(14.6), platform="gpu", bfloat16=False),
    "l4": Chip("NVIDIA L4", _gib(22.0), platform="gpu"),
    "a100-40": Chip("NVIDIA A100 40GB", _gib(39.4), platform="gpu"),
    "a100-80": Chip("NVIDIA A100 80GB", _gib(79.1), platform="gpu"),
    "h100": Chip("NVIDIA H100 80GB", _gib(79.1), platform="gpu"),
    "h200": Chip("NVIDIA H200", _gib(139.7), platform="gpu"),
    "v5e": Chip("TPU v5e", _gib(15.75)),
    "v5p": Chip("TPU v5p", _gib(95.74)),
    "v6e": Chip("TPU v6e", _gib(31.25)),
    "tpu7x": Chip("TPU7x, one of its chip's two devices", _gib(94.75)),
}


def chip(name: str) -> Chip:
    """The chip of that name; UsageError names the known ones."""
    if not isinstance(name, str) or name.lower() not in CHIPS:
        raise UsageError(f"No device is called {quoted(name)}; known are {', '.join(CHIPS)}.")
    return CHIPS[name.lower()]
