"""Every family's golden checkpoint on a mesh of 2 x 2 virtual CPU devices against one device: a line of JSON a case."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from support import family_cases as cases
from support.own_cases import ALIBI, CHATGLM, ROTARY, baichuan_shapes, chatglm_shapes

import kvjax
from kvjax.checkpoints.load import load

MESH = "data=2,model=2"
OWN = {CHATGLM.name: chatglm_shapes, ROTARY.name: baichuan_shapes, ALIBI.name: baichuan_shapes}
CASES = (*cases.CASES, CHATGLM, ROTARY, ALIBI)


def difference(case: cases.FamilyCase) -> dict[str, Any]:
    """Prompts of several lengths, decoded, and a later turn; weights are read straight onto the mesh."""
    shapes = OWN[case.name]() if case.name in OWN else cases.shapes(case)
    found: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = cases.write_folder(case, Path(name) / "m", cases.values(case, shapes))
        for mesh in (None, MESH):
            lm = dataclasses.replace(
                load(folder, dtype="float32", mesh=mesh, progress=False, compile_cache=False), stop_token_ids=()
            )
            options: dict[str, Any] = {"max_new_tokens": 4, "logprobs": True}
            first = kvjax.generate(lm, [case.tokens(40).tolist(), case.tokens(17).tolist()], **options)
            later = kvjax.generate(lm, [[5, 6, 7], [8]], cache=[output.cache for output in first], **options)
            found.append([*first, *later])
    pairs = list(zip(*found, strict=True))
    return {
        "name": case.name,
        "tokens": all(one.tokens == other.tokens for one, other in pairs),
        "off": max(float(np.abs(np.subtract(one.logprobs, other.logprobs)).max()) for one, other in pairs),
    }


if __name__ == "__main__":
    for case in CASES:
        if len(sys.argv) == 1 or case.name in sys.argv[1:]:
            print(json.dumps(difference(case)), flush=True)
