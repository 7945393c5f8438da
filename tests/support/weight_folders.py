"""Folders of weights: their tensors changed, or divided among files, and loaded in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import numpy as np
from safetensors.numpy import load_file, save_file


def leaves(params) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(params)]


def change(folder, edit) -> None:
    """Edit the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder, *, both: str | None = None) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[part::2]) for part in (0, 1)]
    files = [f"model-0000{part + 1}-of-00002.safetensors" for part in (0, 1)]
    table = {name: files[part] for part in (0, 1) for name in halves[part]}
    if both is not None:
        for half in halves:
            half[both] = tensors[both]
    for half, file in zip(halves, files, strict=True):
        save_file(half, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def python(code: str, *arguments: str, **environment: str) -> str:
    import os

    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
