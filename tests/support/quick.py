"""How JAX compiles a toy's programs quickly: they run for milliseconds, and compiling them is most of the suite."""

from __future__ import annotations

import functools
import gc
import importlib.util
import threading
from importlib import metadata

from jax._src.interpreters import mlir

#: The older emitters of fused loops: half the time of the default ones without optimisation, the same with it. And one
#: part of each program for LLVM, since both cores are busy: a tenth less. From 0.12 on jaxlib may lack the emitters,
#: as accelerators' plugins do, and each ends a process that asks for a flag it does not know.
_EMITTERS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
#: Passes that look for loops which run once or never, or that compute the same in every round; a tenth of what a decode
#: loop takes to compile.
_LEFT_OUT = ("simplify-while-loops", "while-loop-invariant-code-motion", "small-while-loop-hoisting")
_OLDER = tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 12)
_ALONE = importlib.util.find_spec("jax_plugins") is None
FLAGS = f"{_EMITTERS if _OLDER else ''} --xla_disable_hlo_passes={','.join(_LEFT_OUT)}" if _ALONE else ""


def on_devices(count: int) -> dict[str, str]:
    """Environment of a process with that many virtual CPU devices, whose programs are not optimised."""
    return {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count} {FLAGS}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_PLATFORMS": "cpu",
    }


def lower_in_one_context() -> None:
    """From here on the main thread's programs are lowered in one MLIR context; JAX makes one for each, of all dialects.

    Making and freeing it is half of what an operation outside jit takes to compile, and JAX's caches keep 1.2 MB of
    each alive: 900 operations leave 0.3 GB instead of 1.4. While a thread of kvjax compiles, programs get their own,
    as always: no two threads work in one context.
    """
    fresh = mlir.make_ir_context
    kept = functools.cache(fresh)

    def make_ir_context():
        alone = not any(thread.name.startswith("kvjax-") for thread in threading.enumerate())
        return kept() if alone and threading.current_thread() is threading.main_thread() else fresh()

    mlir.make_ir_context = make_ir_context


def collect_rarely() -> None:
    """Python's collector looks less often through all that imports and JAX's caches hold."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
