"""The GPU that a program is compiled for, found while tracing: an abstract device or one of this machine."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels import dispatch

#: NVIDIA's table of compute capabilities, by a part of the device's name; the first match counts.
_CAPABILITY = (
    (("GB300", "B300"), (10, 3)),
    (("GB200", "B200", "B100"), (10, 0)),
    (("Blackwell", "RTX 50"), (12, 0)),
    (("GH200", "H200", "H100", "H800", "H20"), (9, 0)),
    (("L40", "L4", "Ada", "RTX 40"), (8, 9)),
    (("A100", "A800", "A30"), (8, 0)),
    (("A40", "A10", "A16", "A2", "RTX A", "RTX 30"), (8, 6)),
    (("V100",), (7, 0)),
    (("T4", "RTX 20"), (7, 5)),
)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU that programs are compiled for.

    Attributes:
      kind: the device's name, "" where nothing is known: a program exported from a machine without one.
      capability: CUDA's compute capability, (major, minor); ``None`` where it is not known.
      processors: streaming multiprocessors; an H100's 132 where it is not known.
      nvidia: ``False`` for AMD's GPUs, which XLA compiles for, but on which these kernels were never run.
    """

    kind: str = ""
    capability: tuple[int, int] | None = None
    processors: int = 132
    nvidia: bool = True

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory one thread block may take, from the CUDA programming guide's table."""
        if self.capability is None or self.capability[0] in (9, 10):
            return 227 << 10
        return (163 << 10) if self.capability == (8, 0) else (99 << 10)


def target() -> Gpu:
    """The abstract device's GPU, when compiling ahead of time, else the first of this process."""
    device = dispatch.abstract_device()
    if device is None and jax.default_backend() == "gpu":
        device = jax.local_devices()[0]
    if device is None:
        return Gpu()
    kind = device.device_kind or ""
    reported = getattr(device, "compute_capability", None)
    capability = _parsed(reported) if reported else _by_name(kind)
    processors = getattr(device, "num_cores", None) or getattr(device, "core_count", None) or Gpu.processors
    # ROCm's capability is "gfx942" or the like.
    return Gpu(kind, capability, int(processors), nvidia=not str(reported or "").startswith("gfx"))


def needs_ampere(gpu: Gpu) -> None:
    """Raise ``NotImplementedError`` for a GPU before Ampere, for which Triton compiles nothing."""
    if gpu.capability is not None and gpu.capability < (8, 0):
        major, minor = gpu.capability
        raise NotImplementedError(f"Triton needs compute capability 8.0, this GPU has {major}.{minor}.")


def _parsed(capability: str) -> tuple[int, int] | None:
    major, _, minor = str(capability).partition(".")
    return (int(major), int(minor or 0)) if major.isdigit() else None


def _by_name(kind: str) -> tuple[int, int] | None:
    return next((capability for names, capability in _CAPABILITY if any(name in kind for name in names)), None)
