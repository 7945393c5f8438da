"""Features of a decoder's blocks on 2 virtual CPU devices against one: a line of JSON a case."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import dataclasses

import jax
import numpy as np
import toys

import kvjax

BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
CASES: dict[str, dict[str, Any]] = {
    "qk_norm": {"qk_norm": True},
    "qk_norm_gathered": {"qk_norm": True, "num_heads": 3, "num_kv_heads": 3, "head_dim": 4},
    "biases": {**BIASES, "vocab_size": 260, "tie_embeddings": False},
    "layer_norms": {**BIASES, "norm": "layer", "mlp": "gelu", "embedding_norm": True, "positional": "alibi"},
}


def difference(changes: dict[str, Any]) -> dict[str, Any]:
    lm = toys.tiny_model(**changes)
    # Norms and biases begin as ones and zeros, which would hide where they act.
    rng = np.random.default_rng(0)
    moved = jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape).astype(x.dtype) * (x.ndim == 1), lm.params)
    lm = dataclasses.replace(lm, params=moved)
    asked: dict[str, Any] = {"max_new_tokens": 8, "logprobs": True, "temperature": 0.0, "chat": False}
    one, two = (kvjax.generate(each, "hello there my friend", **asked) for each in (lm, lm.on("model=2")))
    off = np.abs(np.subtract(one.logprobs, two.logprobs)).max()
    return {"tokens": list(one.tokens) == list(two.tokens), "off": float(off)}


if __name__ == "__main__":
    for name, changes in CASES.items():
        print(json.dumps({"name": name, **difference(changes)}), flush=True)
