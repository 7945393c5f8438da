"""How XLA compiles a toy's programs quickly: they run for milliseconds, and compiling them is most of the suite."""

from __future__ import annotations

from importlib import metadata

#: The older emitters of fused loops: half the time of the default ones without optimisation, the same with it. And one
#: part of each program for LLVM, since both cores are busy: a tenth less. From 0.12 on jaxlib may lack the emitters,
#: and ends a process that asks for a flag it does not know.
_OLDER = tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 12)
EMITTERS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1" if _OLDER else ""


def on_devices(count: int) -> dict[str, str]:
    """Environment of a process with that many virtual CPU devices, whose programs are not optimised."""
    return {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count} {EMITTERS}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_PLATFORMS": "cpu",
    }
