"""Inputs of ``tests/golden/peer_choices.json``, drawn by NumPy's frozen ``RandomState``: scripts/golden_peers.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

CHOICES = Path(__file__).parents[1] / "golden" / "peer_choices.json"

#: DuoAttention: layers, KV heads, seed of the gates, and the fraction of the heads that lose tokens.
GATES = [
    (layers, heads, seed, sparsity)
    for layers, heads, seed in ((32, 8, 0), (30, 3, 1), (2, 4, 2))
    for sparsity in (0.0, 0.25, 0.5, 0.75, 1.0)
]
#: Its streaming heads: tokens, sinks, recent tokens.
STREAMS = [(5, 2, 4), (40, 4, 16), (100, 4, 16), (101, 1, 30), (64, 64, 8), (90, 0, 7)]
#: ThinK: tokens, channels of a head, window, fraction of the channels that leaves, seed.
KEYS = [(100, 64, 32, 0.375, 0), (20, 64, 32, 0.5, 1), (64, 128, 32, 0.625, 2), (50, 16, 8, 0.25, 3)]
KEY_HEADS, GROUP = 2, 3


def asked(tokens: int) -> list[int]:
    """The queries whose tokens are recorded: some, and the last."""
    return sorted({*range(0, tokens, 13), tokens - 1})


def gates(layers: int, heads: int, seed: int) -> np.ndarray:
    """[L, H] as training leaves them: many at 0 and at 1, and no two of the others alike."""
    drawn = np.random.RandomState(seed).uniform(-0.5, 1.5, (layers, heads)).round(4)
    return np.clip(drawn, 0, 1)


def queries_and_keys(tokens: int, dim: int, window: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The window's queries [1, H G, W, D] and all keys [1, H, T, D]; channels differ in size."""
    rng = np.random.RandomState(seed)
    size = rng.uniform(0.2, 2, dim)
    q = rng.standard_normal((1, KEY_HEADS * GROUP, min(window, tokens), dim)) * size
    k = rng.standard_normal((1, KEY_HEADS, tokens, dim)) * size[::-1]
    return q.astype(np.float32), k.astype(np.float32)


def recorded() -> dict[str, Any]:
    """The choices, a list for each of the lists above."""
    return json.loads(CHOICES.read_text())
