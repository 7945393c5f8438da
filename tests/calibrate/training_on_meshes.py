"""Trains a scorer and gates on one device and on meshes: a process of its own, a line of JSON a mesh."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import toys

from kvjax.calibrate.head_gates import gates
from kvjax.calibrate.kvzip_scorer import scorer

TEXT = " ".join(f"Item {i} weighs {7 * i % 31} grams and stands in row {i % 9}." for i in range(150))


def main() -> None:
    one = toys.tiny_model(num_kv_heads=4, num_heads=8)
    for mesh in sys.argv[1:]:
        lm = one if mesh == "none" else one.on(mesh)
        # Five pieces: two devices' last ones are one piece and a row of padding.
        learned = scorer(lm, [TEXT], tokens=100, most=5, sampled=40, steps=40)
        gated = gates(lm, [TEXT], tokens=400, keys=1, words=2, steps=4, sink=1, recent=8, penalty=1.0)
        found = {
            "scorer": [float(loss) for loss in learned.losses],
            "correlation": learned.profile.correlation,
            "gates": [list(row) for row in gated.profile.gates],
            "losses": [float(loss) for loss in gated.losses],
        }
        print(json.dumps({"mesh": mesh, **found}), flush=True)


if __name__ == "__main__":
    main()
