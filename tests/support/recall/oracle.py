"""A llama forward pass with its attention matrices, and RazorAttention's head scores, in NumPy from the definitions.

Reads a Hugging Face folder itself: nothing of kvjax is used, so that agreement means something.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import load_file


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _with_rope(x: np.ndarray, theta: float) -> np.ndarray:
    """[T, heads, D] after rotary embedding: channels i and i + D/2 are a pair."""
    tokens, _, dim = x.shape
    angle = np.arange(tokens)[:, None] * theta ** (-np.arange(0, dim, 2) / dim)
    pairs = x[..., : dim // 2] + 1j * x[..., dim // 2 :]
    after_rope = pairs * np.exp(1j * angle)[:, None]
    return np.concatenate([after_rope.real, after_rope.imag], axis=-1)


def forward(folder: pathlib.Path, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] and attention [L, Hq, T, T] (query, key) of one prompt, float64."""
    config = json.loads((folder / "config.json").read_text())
    return forward_of(config, load_file(folder / "model.safetensors"), tokens)


def forward_of(
    config: dict[str, Any], tensors: dict[str, np.ndarray], tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """:func:`forward` of tensors by Hugging Face's names."""
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    eps, count = config["rms_norm_eps"], len(tokens)
    x, attention = w["model.embed_tokens.weight"][tokens], []
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        y = _norm(x, w[p + "input_layernorm.weight"], eps)
        q, k, v = (
            (y @ w[p + f"self_attn.{name}_proj.weight"].T).reshape(count, n, dim)
            for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if p + "self_attn.q_norm.weight" in w:  # Qwen3's
            q, k = (_norm(a, w[p + f"self_attn.{name}_norm.weight"], eps) for name, a in (("q", q), ("k", k)))
        q, k = _with_rope(q, config["rope_theta"]), _with_rope(k, config["rope_theta"])
        k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        weight = np.where(np.tri(count, dtype=bool), np.exp(scores - scores.max(-1, keepdims=True)), 0)
        weight /= weight.sum(-1, keepdims=True)
        attention.append(weight)
        x = x + np.einsum("hqk,khd->qhd", weight, v).reshape(count, -1) @ w[p + "self_attn.o_proj.weight"].T
        y = _norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate, up = (y @ w[p + f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    return _norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T, np.stack(attention)


def head_scores(attention: np.ndarray, tokens: np.ndarray, period: int, start: int) -> dict[str, np.ndarray]:
    """RazorAttention's echo and induction score of every head (section 3.3 of the paper).

    Echo is a query's attention to earlier positions that hold the query's own token; induction, its attention to the
    positions right after those. Both are summed over the occurrences and averaged over the queries from the second
    repetition on.

    Args:
      attention: [L, Hq, T, T], query by key.
      tokens: [T], a segment of ``period`` tokens repeated, from position ``start`` on.

    Returns:
      ``{"echo": [L, Hq], "induction": [L, Hq]}``.
    """
    count = len(tokens)
    same = (tokens[:, None] == tokens) & (np.arange(count)[:, None] > np.arange(count))
    after = np.zeros_like(same)
    after[:, 1:] = same[:, :-1]  # at the query itself too, when it repeats the token before it
    queries = np.arange(start + period, count)
    return {
        name: (attention * mask).sum(-1)[..., queries].mean(-1) for name, mask in (("echo", same), ("induction", after))
    }


def repeated_segment(vocab: int, period: int, times: int = 4, seed: int = 0) -> np.ndarray:
    """The first token, then ``period`` of the others, all different, ``times`` over: [1 + times * period]."""
    segment = np.random.RandomState(seed).permutation(np.arange(1, vocab))[:period]
    return np.concatenate([[0], np.tile(segment, times)])
