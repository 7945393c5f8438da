"""Lists the collectives of a compiled program, read from its text."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_OPERATION = re.compile(
    r"= (?P<type>\S.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]+[0-9]*)\[(?P<shape>[0-9,]*)\]")
_BYTES = {"f64": 8, "s64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "s8": 1, "u8": 1, "pred": 1}


class Collective(NamedTuple):
    """One kind of exchange: its largest array as XLA writes it, how often the program has it, that array's bytes."""

    kind: str
    array: str
    times: int
    nbytes: int


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program (``compiled.as_text()``), largest first; a loop's body counts once."""
    found: dict[tuple[str, str, int], int] = {}
    for match in _OPERATION.finditer(text):
        arrays = [x for x in _ARRAY.finditer(match["type"]) if x["dtype"] in _BYTES]
        sized = [
            (math.prod(map(int, filter(None, x["shape"].split(",")))) * _BYTES[x["dtype"]], x.group()) for x in arrays
        ]
        if sized:
            size, name = max(sized)
            found[match["kind"], name, size] = found.get((match["kind"], name, size), 0) + 1
    made = [Collective(kind, name, times, size) for (kind, name, size), times in found.items()]
    return sorted(made, key=lambda each: -each.nbytes)
