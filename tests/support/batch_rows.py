"""Files of prompts for jobs of the tiny model, and what the jobs wrote."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

#: Two buckets of prompt length with the chat template: at most 64 tokens, and at most 128.
LENGTHS = (3, 20, 70, 30, 90)
SIZE = 4


def prompts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefgh ", k=LENGTHS[i % len(LENGTHS)])) + "." for i in range(count)]


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Rows as JSON lines; bytes are written as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def records(folder: Path) -> list[dict[str, Any]]:
    """What a job wrote, in order."""
    lines = [line for path in sorted(folder.glob("part-*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
