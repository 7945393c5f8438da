"""Profile of a compiled TPU kernel, read from libtpu's dumps: its loop's schedule and its spilled registers.

A *bundle* is one long instruction. Between two, the compiler schedules empty cycles where results are not ready yet;
they are folded into delays in the final program and are seen only in the schedule before it ("packed-bundles-post-ra").
So ``cycles`` is how long an iteration of the loop takes when nothing waits for memory, and ``bundles`` only how many of
its cycles issue an instruction: a kernel of 150 bundles may take 700 cycles.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

# "0x1f LB: > {...}": address, marks (LB where a loop's body begins), one ">" for every loop around it, and "{}" for
# an empty cycle.
_BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +([A-Z ]*):([> ]*)\{(\}?)", re.MULTILINE)
_UTILIZATION = re.compile(r"[0-9 ]+")
#: Columns of the table of what each bundle uses.
_FILL, _SPILL = 6, 8


@dataclasses.dataclass(frozen=True)
class KernelProfile:
    """One compiled kernel.

    Attributes:
      name: as given to ``pallas_call``.
      bundles: instructions of an iteration of its loop. cycles: length of that schedule. 0 where there is no loop.
      spills: registers stored to memory, or loaded from there again, for want of registers; the greater number.
      registers: of a thread, on GPU.
    """

    name: str
    bundles: int = 0
    cycles: int = 0
    spills: int = 0
    registers: int = 0


def environment(dump: Path) -> dict[str, str]:
    """Variables a process must start with, so that libtpu compiles without a TPU and leaves its dumps there."""
    return {
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
        # Of some 80 dumps of every program, the two that are read.
        "--xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra|final_hlo-static-per-bundle-utilization",
        # Else a second process that has libtpu loaded is refused.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # Else the machine's own metadata is asked for, and its absence complained about.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }


def profiles(dump: Path) -> list[KernelProfile]:
    """Profiles of all kernels that are dumped in this folder."""
    found = []
    for schedule in sorted(dump.glob("*-packed-bundles-post-ra.txt")):
        # <number>-<kernel>.<instance>-<stage>-<dump>
        match = re.fullmatch(r"(\d+)-(.+?)(?:\.\d+)?-\d+-packed-bundles-post-ra\.txt", schedule.name)
        if match is None or match[2].startswith(("TLP", "<")):
            continue
        bundles, cycles = _loop(schedule.read_text())
        tables = dump.glob(f"{match[1]}-*-final_hlo-static-per-bundle-utilization.txt")
        spills = sum(_spills(table.read_text()) for table in tables if f"-{match[2]}" in table.name)
        found.append(KernelProfile(match[2], bundles, cycles, spills))
    return found


def _loop(schedule: str) -> tuple[int, int]:
    """Bundles and cycles of the longest loop, with one iteration of each loop inside it.

    That is exact, as inner loops are scheduling barriers of at most one iteration; only those of attention_mass over a
    block that the diagonal crosses have up to 8, which the page says.
    """
    loops, depth = [(0, 0)], 0
    for marks, nesting, empty in _BUNDLE.findall(schedule):
        if not empty:
            depth = nesting.count(">")
        if depth == 1 and "LB" in marks:
            loops.append((0, 0))
        if depth:
            bundles, cycles = loops[-1]
            loops[-1] = (bundles + (not empty), cycles + 1)
    return max(loops, key=lambda loop: loop[1])


def _spills(table: str) -> int:
    rows = [[int(x) for x in line.split()] for line in table.splitlines() if _UTILIZATION.fullmatch(line)]
    # The first row is what there is of each unit.
    used = [row for row in rows[1:] if len(row) > _SPILL]
    return max(sum(row[_FILL] for row in used), sum(row[_SPILL] for row in used))
