"""The cost of a compiled decode step on a TPU by XLA's own model, read from the program's text.

XLA for TPUs writes ``estimated_cycles`` beside every fusion, product and copy that it has scheduled. A Pallas kernel
has none: its loop's schedule is in :mod:`tools.aot.tpu_profile`. Nor has an asynchronous copy, with which weights are
brought to the chip's own memory while something else runs; of those the bytes are known.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

#: Name under which ``pallas_call`` has the kernel of a decode step's attention.
KERNEL = "ragged_decode"
_COMPUTATION = re.compile(r"(?:ENTRY )?%?(?P<name>[\w.\-]+) \(?.*\{$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLED = re.compile(r" (?P<how>while|call|conditional)\(.*?\)(?P<rest>, .*)")
_BODY = re.compile(r"(?:body|to_apply)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TWO = re.compile(r"(?:true|false)_computation=%([\w.\-]+)")
_KERNEL = re.compile(rf"%{KERNEL}[\w.]* = .*custom-call\(")
#: An asynchronous copy or slice: its types are the operand's and the result's, of which S(1) is the chip's own memory.
_COPY = re.compile(r" = \((?P<types>.*?)\) (?:copy|slice|async)-start\(")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+[0-9a-z]*)\[(?P<shape>[0-9,]*)\](?:\{(?P<layout>[^}]*)\})?")
_BITS = {"f32": 32, "s32": 32, "u32": 32, "bf16": 16, "f16": 16, "s16": 16, "s8": 8, "u8": 8, "pred": 8, "s4": 4}
_OWN_MEMORY = "S(1)"


@dataclasses.dataclass(frozen=True)
class StepCost:
    """One pass through the loop over steps.

    Attributes:
      cycles: of XLA's own operations, one after another; of two branches the shorter one, as a greedy
        step takes, and of a loop among them one pass.
      kernels: calls of the attention kernel. copied_bytes: brought to the chip's own memory by asynchronous copies.
      collectives: exchanges with other devices, which the cost model leaves out.
    """

    cycles: int = 0
    kernels: int = 0
    copied_bytes: int = 0
    collectives: int = 0

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def scaled(self, factor: float) -> StepCost:
        return StepCost(*(round(factor * x) for x in dataclasses.astuple(self)))


_COLLECTIVE = re.compile(r" (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def step_cost(text: str, layers: int, of: int) -> StepCost:
    """The cost of a step of a model of ``of`` layers, from a program of fewer that are all alike.

    Args:
      text: ``compiled.as_text()``, scheduled. layers: of the program, at least 2. What is between the attention kernel
        of the first and of the last of them is that of ``layers - 1`` layers.
    """
    computations = _computations(text)
    step = max(computations, key=lambda name: sum(bool(_KERNEL.search(line)) for line in computations[name]))
    lines = computations[step]
    calls = [i for i, line in enumerate(lines) if _KERNEL.search(line)]
    if layers < 2 or len(calls) % layers:
        raise ValueError(f"{len(calls)} kernels in {layers} layers")
    between = _cost(computations, lines[calls[0] : calls[-len(calls) // layers]])
    return _cost(computations, lines) + between.scaled((of - layers) / (layers - 1))


def _computations(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        head = None if line.startswith(" ") else _COMPUTATION.match(line)
        if head:
            lines = found[head["name"]] = []
        else:
            lines.append(line)
    return found


def _cost(computations: Mapping[str, Sequence[str]], lines: Sequence[str]) -> StepCost:
    total = StepCost()
    for line in lines:
        own = _CYCLES.search(line)
        total += StepCost(
            int(own[1]) if own else 0,
            int(bool(_KERNEL.search(line))),
            _copied(line),
            int(bool(_COLLECTIVE.search(line))),
        )
        called = _CALLED.search(line)
        if called is None:
            continue
        if called["how"] == "conditional":
            branches = _BRANCHES.search(line)
            names = re.findall(r"%([\w.\-]+)", branches[1]) if branches else _TWO.findall(line)
            total += min((_cost(computations, computations[x]) for x in names), key=lambda cost: cost.cycles)
        else:
            body = _BODY.search(called["rest"])
            total += _cost(computations, computations[body[1]]) if body else StepCost()
    return total


def _copied(line: str) -> int:
    """Bytes that an asynchronous copy brings from the device's memory into the chip's own."""
    copy = _COPY.search(line)
    if copy is None:
        return 0
    arrays = [x for x in _ARRAY.finditer(copy["types"]) if x["dtype"] in _BITS]
    if len(arrays) < 2 or _own(arrays[0]) or not _own(arrays[1]):
        return 0
    return math.prod(map(int, filter(None, arrays[1]["shape"].split(",")))) * _BITS[arrays[1]["dtype"]] // 8


def _own(array: re.Match[str]) -> bool:
    return _OWN_MEMORY in (array["layout"] or "")
