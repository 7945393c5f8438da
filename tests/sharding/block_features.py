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
from kvjax.model.config import RopeConfig
from kvjax.model.experts import Experts

BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
CASES: dict[str, dict[str, Any]] = {
    "windows": {"windows": (12, None), "window_rope": RopeConfig(theta=50.0), "attention_soft_cap": 2.0},
    "experts": {"experts": Experts(5, 2, 32), "intermediate_size": 32},
    "experts_shared": {"experts": Experts(4, 3, 16, normalised=False, shared_inner=32, dense_layers=(1,))},
    "sinks": {
        "attention_sinks": True,
        "windows": (12, None),
        "experts": Experts(5, 2, 32, biased=True, limit=0.5),
        "intermediate_size": 32,
    },
    "by_head_gathered": {
        "qk_norm_by_head": True,
        "norm": "layer",
        "attention_sinks": True,
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 4,
    },
    "qk_norm": {"qk_norm": True},
    "qk_norm_gathered": {"qk_norm": True, "num_heads": 3, "num_kv_heads": 3, "head_dim": 4},
    "biases": {**BIASES, "vocab_size": 260, "tie_embeddings": False},
    "across_heads": {"qk_norm_across_heads": True, "norm_order": "post"},
    "across_heads_gathered": {"qk_norm_across_heads": True, "num_heads": 3, "num_kv_heads": 3, "head_dim": 4},
    "both_norms": {"norm_order": "both", "norm_offset": True, "mlp": "gated_gelu", "rotary_dim": 4},
    "parallel": {**BIASES, "norm": "layer", "mlp": "gelu_exact", "parallel_block": True, "head_bias": True},
    "shared_norm": {"norm": "layer", "norm_bias": False, "parallel_block": True, "shared_norm": True},
    "scales": {
        "embedding_scale": 5.0,
        "residual_scale": 0.4,
        "logit_scale": 0.3,
        "attention_multiplier": 0.5,
        "logit_soft_cap": 3.0,
        "no_rotary_layers": (1,),
    },
    "int8": {"weights": "int8", "vocab_size": 260, "tie_embeddings": False, "qkv_bias": True},
    "fp8": {"weights": "fp8", "vocab_size": 260, "tie_embeddings": False, "qkv_bias": True},
    "layer_norms": {**BIASES, "norm": "layer", "mlp": "gelu", "embedding_norm": True, "positional": "alibi"},
}


def difference(changes: dict[str, Any]) -> dict[str, Any]:
    lm = toys.tiny_model(**changes)
    # Norms and biases begin as ones and zeros, which would hide where they act.
    rng = np.random.default_rng(0)
    moved = jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape).astype(x.dtype) * (x.ndim == 1), lm.params)
    if lm.config.weights is None:  # other vectors are the scales of matrices
        lm = dataclasses.replace(lm, params=moved)
    asked: dict[str, Any] = {"max_new_tokens": 8, "logprobs": True, "temperature": 0.0, "chat": False}
    one, two = (kvjax.generate(each, "hello there my friend", **asked) for each in (lm, lm.on("model=2")))
    off = np.abs(np.subtract(one.logprobs, two.logprobs)).max()
    return {"tokens": list(one.tokens) == list(two.tokens), "off": float(off)}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps({"name": name, **difference(CASES[name])}), flush=True)
