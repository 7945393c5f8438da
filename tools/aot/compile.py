"""Compile cases for one target, in a process of its own: ``python -m tools.aot.compile --help``.

Compilers read their settings when they are loaded and may end the whole process when they fail; so ``tools.aot``
starts this one with the platform's environment, reads one line of JSON per case, and restarts it after a crash.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

from tools.aot.cases import Case, collect
from tools.aot.targets import Target, platform, targets

#: Exit status that asks for a new process: Mosaic GPU caches compiled kernels, and dumps nothing for one that an
#: earlier case had compiled.
AGAIN = 75

#: A Pallas kernel in a compiled program, of any backend.
_CALL = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu\w*|__gpu\$xla\.gpu\.triton)"')


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of compiling a case.

    Attributes:
      error: first line of the compiler's message, or "". broken: limits that are exceeded.
      temp_bytes: temporary memory of the whole program. cache_bytes: the case's.
      memory_cycles: cycles in which the target's memory delivers what an iteration of the loop reads; 0 if unknown.
      bundles, cycles, spills, registers: the largest of its kernels'; see ``KernelProfile``.
      calls, read: Pallas kernels that the program calls, and those for which the compiler dumped a profile.
    """

    case: str
    operation: str
    target: str
    error: str = ""
    broken: tuple[str, ...] = ()
    temp_bytes: int = 0
    cache_bytes: int = 0
    memory_cycles: int = 0
    bundles: int = 0
    cycles: int = 0
    spills: int = 0
    registers: int = 0
    calls: int = 0
    read: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.error and not self.broken


def selected(cases: list[Case], target: Target, operations: list[str], named: str = "") -> list[Case]:
    """Cases for this target, of these operations (all if none is given), whose names match ``named``."""
    return [
        case
        for case in cases
        if target.platform in case.platforms
        and re.search(named, case.name)
        and (not case.targets or target.name in case.targets)
        and (not operations or case.operation in operations)
    ]


def _placed(case: Case, target: Target, sharding: Any) -> list[Any]:
    """The arguments' shapes on the target, in the layouts that the case gives them there."""
    import jax
    from jax.experimental.layout import Format

    def placed(leaf: Any, layout: Any) -> Any:
        where = sharding if layout is None else Format(layout, sharding)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    found = []
    for i, argument in enumerate(case.arguments):
        of = case.layouts.get(i)
        found.append(jax.tree.map(lambda x, of=of: placed(x, None if of is None else of(target.name, x)), argument))
    return found


def compile_case(case: Case, target: Target, dump: Path) -> Result:
    """Compile, and read what the compiler left in ``dump``, which is emptied first."""
    import jax

    shutil.rmtree(dump, ignore_errors=True)
    dump.mkdir(parents=True)
    sharding = target.sharding()
    arguments = _placed(case, target, sharding)
    began = time.perf_counter()
    try:
        # The abstract mesh tells kernels which chip they are traced for.
        with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
            compiled = jax.jit(case.function, donate_argnums=case.donated).lower(*arguments).compile()
        memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the result
        line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return Result(case.name, case.operation, target.name, error=f"{type(error).__name__}: {line}")
    seconds = time.perf_counter() - began
    kernels = case.kernels or ((case.operation,) if target.platform == "tpu" else ())
    profiles = [x for x in platform(target.platform).profiles(dump) if not kernels or x.name in kernels]
    result = Result(
        case.name,
        case.operation,
        target.name,
        temp_bytes=int(memory.temp_size_in_bytes) if memory is not None else 0,
        cache_bytes=case.cache_bytes,
        memory_cycles=round(case.block_bytes.get(target.name, 0) / max(target.bandwidth, 1.0) * target.clock),
        bundles=max((x.bundles for x in profiles), default=0),
        cycles=max((x.cycles for x in profiles), default=0),
        spills=max((x.spills for x in profiles), default=0),
        registers=max((x.registers for x in profiles), default=0),
        calls=len(_CALL.findall(text)),
        read=len(profiles),
        seconds=seconds,
    )
    return dataclasses.replace(result, broken=_broken(case, result))


def _broken(case: Case, result: Result) -> tuple[str, ...]:
    broken = []
    if result.calls and not result.read:
        broken.append("the compiler left nothing to read of its kernels")
    if result.temp_bytes >= case.temp_limits.get(result.target, case.temp_limit) * case.cache_bytes:
        broken.append(f"{result.temp_bytes} temporary bytes for a cache of {case.cache_bytes}")
    if result.spills > case.spills:
        broken.append(f"{result.spills} spills, at most {case.spills}")
    limit = case.bundles.get(result.target)
    if limit is not None and result.bundles > limit:
        broken.append(f"{result.bundles} bundles, at most {limit}")
    return tuple(broken)


def main() -> None:
    """One line of JSON a case, on the file named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--modules", required=True, help="of cases, comma-separated")
    parser.add_argument("--operations", default="", help="comma-separated; all by default")
    parser.add_argument("--named", default="", help="part of the cases' names, a regular expression")
    parser.add_argument("--skip", type=int, default=0, help="cases to leave out, of those selected")
    parser.add_argument("--dump", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target = targets()[options.target]
    operations = [name for name in options.operations.split(",") if name]
    cases = selected(collect(options.modules.split(",")), target, operations, options.named)
    with options.out.open("a") as out:
        for number, case in enumerate(cases[options.skip :]):
            # The name first: after a crash it is known which case it was.
            out.write(json.dumps({"case": case.name, "operation": case.operation, "target": target.name}) + "\n")
            out.flush()
            result = compile_case(case, target, options.dump)
            if number and result.calls and not result.read:
                raise SystemExit(AGAIN)
            out.write(json.dumps(dataclasses.asdict(result)) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
