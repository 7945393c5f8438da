"""GPUs to compile for, and profiles of compiled GPU kernels: registers and spills, as ``ptxas`` counts them.

XLA dumps the PTX of every kernel, Triton's included, and Mosaic GPU that of its own; both are assembled once more here,
for the counts.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from tools.aot.targets import Target
from tools.aot.tpu_profile import KernelProfile

_FOLDER = Path(__file__).parent / "gpu_targets"


def _target(name: str) -> Target:
    text = (_FOLDER / f"{name}.txtpb").read_text()
    clock, bandwidth = _number(text, "clock_rate_ghz"), _number(text, "memory_bandwidth")
    topology = (("platform", "cuda"), ("topology_name", ""), ("target_config", text), ("topology", "1x1x1"))
    return Target(name, "gpu", topology, clock * 1e9, bandwidth)


def _number(text: str, field: str) -> float:
    found = re.search(rf"\b{field}: ([\d.]+)", text)
    if found is None:
        raise ValueError(f"a target's description has no {field}.")
    return float(found[1])


#: A100, H200 and B200.
TARGETS = tuple(_target(name) for name in ("sm_80", "sm_90", "sm_100"))

# "ptxas info : Compiling entry function 'name' for 'sm_90a'", then its stack frame and spills, then its registers.
_COUNTS = re.compile(
    r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.S
)


def environment(dump: Path) -> dict[str, str]:
    """Variables a process must start with, so that kernels' PTX is left there."""
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_emitter_re=ptx",
        "MOSAIC_GPU_DUMP_TO": str(dump),
        "MOSAIC_GPU_DUMP_PTX": "1",
    }


def profiles(dump: Path) -> list[KernelProfile]:
    """Profiles of all kernels whose PTX is in this folder; a spill is 4 bytes stored and loaded again."""
    found = []
    for path in sorted(dump.rglob("*.ptx")):
        for name, stored, loaded, registers in _COUNTS.findall(_assembled(path)):
            # Mosaic GPU's own ending.
            kernel = name.removesuffix("_mosaic_gpu_kernel")
            spills = max(int(stored), int(loaded)) // 4
            found.append(KernelProfile(kernel, spills=spills, registers=int(registers)))
    return found


def _assembled(path: Path) -> str:
    """Output of ``ptxas`` for a file."""
    architecture = re.search(r"^\.target (\w+)", path.read_text(), re.M)
    if architecture is None:
        return ""
    command = [_ptxas(), "-v", f"-arch={architecture[1]}", str(path), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _ptxas() -> str:
    """The assembler of the installed CUDA wheels, else of the machine."""
    wheels = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin/ptxas"))
    found = str(wheels[-1]) if wheels else shutil.which("ptxas")
    if found is None:
        raise FileNotFoundError("There is no ptxas: install jax[cuda13], whose wheels hold it.")
    return found
