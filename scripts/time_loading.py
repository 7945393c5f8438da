"""Times loading a converted model against what it was converted from, by turns, each in a process of its own.

python scripts/time_loading.py [MODEL] [--weights int8] [--random LAYERS] [--runs 5]

``--random`` first writes a llama of random numbers as bfloat16 safetensors, with the widths of Llama-3.2-1B. Every file
is in the system's cache: each is loaded once before it is timed. Modules are imported before that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvjax.model.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
_CHILD = """
import sys, time
import jax, kvjax, tokenizers, transformers
import kvjax.checkpoints.load, kvjax.documents
jax.devices()
name, weights = sys.argv[1], sys.argv[2] or None
began, worked = time.perf_counter(), time.process_time()
lm = kvjax.load(name, weights=weights, progress=False, compile_cache=False)
jax.block_until_ready(jax.tree.leaves(lm.params))
print(time.perf_counter() - began, time.process_time() - worked)
"""


def seconds(path: str, weights: str | None) -> tuple[float, float]:
    """Seconds, and processor seconds, that ``kvjax.load`` takes in a new process."""
    command = [sys.executable, "-c", _CHILD, path, weights or ""]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    return float(found[0]), float(found[1])


def write_safetensors(folder: Path, layers: int) -> Path:
    """A llama of random numbers with the widths of Llama-3.2-1B, as a folder in Hugging Face's form, bfloat16."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    import kvjax
    from kvjax.checkpoints.families import FAMILIES

    config = {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    }  # fmt: skip
    random = np.random.default_rng(0)
    shapes = {weight.hf: weight.shape for weight in FAMILIES["llama"].weights(_config(config), False)}
    tensors = {
        name: (random.random(shape, np.float32) * 0.1 - 0.05).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(kvjax.load("smollm2-135m-instruct", progress=False).tokenizer.to_json())
    save_file(tensors, folder / "model.safetensors")
    return folder


def _config(config: dict[str, object]) -> ModelConfig:
    from kvjax.checkpoints.families import FAMILIES

    return FAMILIES["llama"].from_hf(config, "config.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--weights")
    parser.add_argument("--random", type=int, metavar="LAYERS")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        original = given.model
        if given.random:
            original = str(write_safetensors(Path(name) / "original", given.random))
        converted = str(Path(name) / "converted")
        command = [sys.executable, "-m", "kvjax", "convert", original, "--out", converted]
        weights = ["--weights", given.weights] if given.weights else []
        subprocess.run(command + weights, check=True, cwd=ROOT)
        forms = {"original": (original, given.weights), "converted": (converted, None)}
        found = {form: [seconds(*place)] for form, place in forms.items()}
        for _ in range(given.runs):
            for form, place in forms.items():
                found[form].append(seconds(*place))
    median = {
        form: [statistics.median(column) for column in zip(*runs[1:], strict=True)] for form, runs in found.items()
    }
    for form, (wall, processor) in median.items():
        print(f"{form:10} {wall:.2f} s, {processor:.2f} s of processor time")
    ratios = [one / other for one, other in zip(median["original"], median["converted"], strict=True)]
    print(f"converted loads {ratios[0]:.1f} times as fast, with {ratios[1]:.1f} times less processor time")


if __name__ == "__main__":
    main()
