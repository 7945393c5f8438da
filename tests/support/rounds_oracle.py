"""Round Attention in NumPy, from the paper: a dense llama in float64, qAtt [1], and what the strategies take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from kvjax.checkpoints.load import LanguageModel
from kvjax.model.params import logical


@dataclasses.dataclass
class Dense:
    """One layer of one sequence: queries [H, G, T, D] and keys [H, T, D] after rotary, values [H, T, D]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    def attention(self) -> np.ndarray:
        """[H, G, T, T] causal softmax attention."""
        scores = np.einsum("hgtd,hsd->hgts", self.q, self.k) / math.sqrt(self.q.shape[-1])
        scores[..., ~np.tri(scores.shape[-1], dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True)


def _array(param) -> np.ndarray:
    return np.asarray(logical(param), np.float64)


def _norm(x: np.ndarray, norm) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + norm.eps) * np.asarray(norm.weight[...], np.float64)


def _with_rope(x: np.ndarray, theta: float) -> np.ndarray:
    """[..., T, D] after rotary embedding: pairs (i, i + D / 2), angles position x theta ** (-2 i / D)."""
    half = x.shape[-1] // 2
    phase = np.arange(x.shape[-2])[:, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(phase) - second * np.sin(phase), second * np.cos(phase) + first * np.sin(phase)], axis=-1
    )


def dense_layers(lm: LanguageModel, ids: Sequence[int], count: int) -> list[Dense]:
    """The first ``count`` layers of a tied-embedding llama over a whole sequence."""
    config = lm.config
    x, found = _array(lm.params.head).T[list(ids)], []
    for layer in list(lm.params.layers)[:count]:
        both = np.einsum("tm,mhgd->hgtd", _norm(x, layer.input_norm), _array(layer.qkv))
        q, k, v = both[:, :-2], both[:, -2], both[:, -1]
        dense = Dense(_with_rope(q, config.rope.theta), _with_rope(k, config.rope.theta), v)
        found.append(dense)
        attended = np.einsum("hgts,hsd->thgd", dense.attention(), v)
        x = x + np.einsum("thgd,hgdm->tm", attended, _array(layer.out))
        inner = np.einsum("tm,mcjf->tjcf", _norm(x, layer.post_attention_norm), _array(layer.gate_up))
        gate, up = (inner[:, j].reshape(len(x), -1) for j in (0, 1))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ _array(layer.down)
    return found


def q_att(dense: Dense, rounds: Sequence[tuple[int, int]], question: tuple[int, int]) -> np.ndarray:
    """[R] attention of the question's tokens to each round's, summed over both and over heads, normalised [1]."""
    weights = dense.attention()[:, :, question[0] : question[1]]
    total = np.array([weights[..., first:last].sum() for first, last in rounds])
    return total / total.sum()


def taken(strategy: str, attention: Sequence[float], top: float, threshold: float, std: float) -> set[int]:
    """Section 3.3, with at least one round, the later of equals."""
    n = len(attention)
    ranked = sorted(range(n), key=lambda i: (attention[i], i), reverse=True)
    if strategy == "topk":
        return set(ranked[: max(math.floor(top * n + 1e-9), 1)])
    mean = sum(attention) / n
    spread = math.sqrt(sum((a - mean) ** 2 for a in attention) / n)
    limit = {"fixed": threshold, "adaptive": mean + std * spread, "above_mean": mean}[strategy]
    return {i for i in range(n) if attention[i] - limit > 1e-9 * limit} or {ranked[0]}
