"""GPUs that are not there: what a kernel is traced and lowered for in tests without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

H100 = ("NVIDIA H100 80GB HBM3", 132)
A100 = ("NVIDIA A100-SXM4-80GB", 108)


def on(kind: str, cores: int) -> Any:
    """Trace for this device, within a ``with``."""
    device = jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=cores)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def lowered(function: Callable[..., Any], *arguments: Any, device: tuple[str, int] = H100) -> str:
    """The module that CUDA's compiler would be given, as text: what ``jax.export`` keeps, without its format."""
    with on(*device):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
