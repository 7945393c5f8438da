"""BLOOM token by token as its paper says it, in float64 NumPy from a checkpoint's tensors, under any attention mask.

Transcribed from Press et al. (arXiv 2108.12409, section 3: the bias of query i and key j is -m (i - j)) and Le Scao
et al. (arXiv 2211.05100, section 3.2); nothing is shared with kvjax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np


def slopes(heads: int) -> list[float]:
    """Slopes of n heads, by the recipe in words: see the authors' get_slopes."""

    def of_power(n: int) -> list[float]:
        start = 2.0 ** (-8 / n)
        return [start**i for i in range(1, n + 1)]

    if math.log2(heads).is_integer():
        return of_power(heads)
    below = 2 ** math.floor(math.log2(heads))
    return of_power(below) + slopes(2 * below)[0::2][: heads - below]


def _norm(x: np.ndarray, tensors: Mapping[str, np.ndarray], name: str, eps: float) -> np.ndarray:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    return x * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def _linear(x: np.ndarray, tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    return x @ tensors[f"{name}.weight"].astype(np.float64).T + tensors[f"{name}.bias"]


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def logits(
    tensors: Mapping[str, np.ndarray],
    tokens: np.ndarray,
    layers: int,
    heads: int,
    *,
    eps: float = 1e-5,
    hidden_from: np.ndarray | None = None,
    positions: np.ndarray | None = None,
) -> np.ndarray:
    """Logits [T, V] of one prompt.

    Args:
      tensors: transformers' names, float32.
      tokens: [T] ids.
      layers, heads: of the model.
      eps: of every norm.
      hidden_from: [layers, heads, T, T] True where query i must not see key j, beside the causal mask.
      positions: [T, T] position of key j as query i counts, and of the query on the diagonal; its index by default.
    """
    count = len(tokens)
    causal = np.tril(np.ones((count, count), bool))
    place = np.broadcast_to(np.arange(count), (count, count)) if positions is None else positions
    distance = np.diagonal(place)[:, None] - place
    root = "transformer."
    x = _norm(tensors[f"{root}word_embeddings.weight"][tokens].astype(np.float64), tensors,
              f"{root}word_embeddings_layernorm", eps)  # fmt: skip
    for layer in range(layers):
        block = f"{root}h.{layer}."
        fused = _linear(_norm(x, tensors, f"{block}input_layernorm", eps), tensors,
                        f"{block}self_attention.query_key_value")  # fmt: skip
        q, k, v = np.moveaxis(fused.reshape(count, heads, 3, -1), 2, 0)
        attended = np.zeros_like(q)
        for head, slope in enumerate(slopes(heads)):
            scores = q[:, head] @ k[:, head].T / math.sqrt(q.shape[-1]) - slope * distance
            seen = causal if hidden_from is None else causal & ~hidden_from[layer, head]
            scores = np.where(seen, scores, -np.inf)
            weight = np.exp(scores - scores.max(-1, keepdims=True))
            attended[:, head] = weight / weight.sum(-1, keepdims=True) @ v[:, head]
        x = x + _linear(attended.reshape(count, -1), tensors, f"{block}self_attention.dense")
        inner = _linear(_norm(x, tensors, f"{block}post_attention_layernorm", eps), tensors,
                        f"{block}mlp.dense_h_to_4h")  # fmt: skip
        x = x + _linear(_gelu(inner), tensors, f"{block}mlp.dense_4h_to_h")
    x = _norm(x, tensors, f"{root}ln_f", eps)
    head = tensors.get("lm_head.weight", tensors[f"{root}word_embeddings.weight"])
    return x @ head.astype(np.float64).T
