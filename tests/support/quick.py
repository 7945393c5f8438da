"""How XLA compiles a toy's programs quickly: they run for milliseconds, and compiling them is most of the suite."""

from __future__ import annotations

#: The older emitters of fused loops: half the time of the default ones without optimisation, the same with it.
EMITTERS = "--xla_cpu_use_fusion_emitters=false"


def on_devices(count: int) -> dict[str, str]:
    """Environment of a process with that many virtual CPU devices, whose programs are not optimised."""
    return {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count} {EMITTERS}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_PLATFORMS": "cpu",
    }
