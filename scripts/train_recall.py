"""Train the recall model of the tests and write it as a Hugging Face folder.

    python scripts/train_recall.py [FOLDER]      # by default tests/golden/recall, which is what the tests read

Needs optax (the extra "dev"). The recipe is ``tests/support/recall/training.py``; ``SEED`` decides the parameters and
every batch, so the same machine and versions give the same weights. They are stored in float16.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.recall import training  # noqa: E402

SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the recall model of the tests.")
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=ROOT / "tests" / "golden" / "recall")
    folder = parser.parse_args().folder
    began = time.process_time()

    def report(step: int, phase: training.Phase, loss: float) -> None:
        if step % 20 == 0:
            seconds = time.process_time() - began
            print(f"step {step:4d}  length {phase.length:3d}  loss {loss:.3f}  {seconds:.0f} s of CPU", flush=True)

    params, losses = training.train(training.CONFIG, training.PHASES, SEED, report)
    training.write_folder(params, folder)
    size = (folder / "model.safetensors").stat().st_size
    print(f"{folder}: {size / 1e3:.0f} kB, loss {losses[-20:].mean():.3f} over the last 20 steps")


if __name__ == "__main__":
    main()
