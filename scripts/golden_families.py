"""Ask the reference implementation (torch, transformers) for the golden logits of many families.

Needs torch and transformers; nobody needs it to install, run or test kvjax. From the repository:

    python scripts/golden_families.py [CASE...]

Writes ``tests/golden/families.json``, names and shapes of the tensors that transformers saves of each case of
``tests/support/family_cases.py``, and ``tests/golden/families.npz``: ``"<case>/<length>"`` holds the float32 logits
[length, vocab] of one prompt, at all its positions. With names of cases, the others stay as they are.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from support import family_cases as cases  # noqa: E402


def saved(case: cases.FamilyCase, folder: pathlib.Path) -> dict[str, list[int]]:
    """Names and shapes of what transformers saves of a model of the case's configuration."""
    (folder / "config.json").write_text(json.dumps(dict(case.config)))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder / "saved")
    with safe_open(folder / "saved" / "model.safetensors", "np") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[1:]
    shapes, logits = {}, {}
    for case in cases.CASES:
        if chosen and case.name not in chosen:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            shapes[case.name] = saved(case, folder)
            path = cases.write_folder(case, folder / "model", cases.values(case, shapes[case.name]))
            for length in case.lengths:
                # A fresh model every time: scalings may remember the longest prompt they have seen.
                model, info = AutoModelForCausalLM.from_pretrained(
                    path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
                )
                assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
                found = model.eval()(torch.tensor(case.tokens(length))[None], use_cache=False).logits[0]
                logits[f"{case.name}/{length}"] = found.float().numpy()
        print(case.name, flush=True)
    if chosen:
        shapes = json.loads((cases.GOLDEN / "families.json").read_text()) | shapes
        logits = dict(np.load(cases.GOLDEN / "families.npz")) | logits
    (cases.GOLDEN / "families.json").write_text(json.dumps(shapes, indent=0, sort_keys=True) + "\n")
    np.savez_compressed(cases.GOLDEN / "families.npz", **logits)


if __name__ == "__main__":
    main()
