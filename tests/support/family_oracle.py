"""Forward passes in NumPy of the families that transformers lacks, in float64, written from their papers.

GLM-4-9B as "chatglm" (arXiv 2406.12793, section 2: RMS norms, SwiGLU, grouped queries, rotary embedding of half of each
head in neighbouring pairs, biases of queries, keys and values alone) and Baichuan (arXiv 2309.10305, section 2: RMS
norms, SwiGLU, rotary embedding in the 7B and ALiBi in the 13B models, a head of normalised rows in Baichuan 2).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from support.family_cases import FamilyCase

Tensors = Mapping[str, np.ndarray]


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Causal attention of [T, N, D] heads; fewer KV heads serve neighbouring queries. ``bias`` [N, T, T] is added."""
    length, heads, dim = q.shape
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("tnd,snd->nts", q, k) / np.sqrt(dim) + bias
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nts,snd->tnd", weights / weights.sum(-1, keepdims=True), v).reshape(length, -1)


def _with_rope(x: np.ndarray, theta: float, channels: int, neighbours: bool) -> np.ndarray:
    """Rotary embedding of the first channels of [T, N, D], each pair as one complex number."""
    frequency = theta ** (-np.arange(0, channels, 2) / channels)
    phasor = np.exp(1j * np.arange(len(x))[:, None] * frequency)[:, None]
    part, rest = x[..., :channels], x[..., channels:]
    if neighbours:
        pairs = (part[..., ::2] + 1j * part[..., 1::2]) * phasor
        part = np.stack([pairs.real, pairs.imag], -1).reshape(part.shape)
    else:
        pairs = (part[..., : channels // 2] + 1j * part[..., channels // 2 :]) * phasor
        part = np.concatenate([pairs.real, pairs.imag], -1)
    return np.concatenate([part, rest], -1)


def chatglm(case: FamilyCase, tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V]."""
    c, w = case.config, {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    heads, shared, dim = c["num_attention_heads"], c["multi_query_group_num"], c["kv_channels"]
    eps, theta = c["layernorm_epsilon"], 10000.0 * c["rope_ratio"]
    x = w["transformer.embedding.word_embeddings.weight"][tokens]
    for i in range(c["num_layers"]):
        own = {name.split(".", 4)[4]: x for name, x in w.items() if name.startswith(f"transformer.encoder.layers.{i}.")}
        y = _rms(x, own["input_layernorm.weight"], eps)
        y = y @ own["self_attention.query_key_value.weight"].T + own["self_attention.query_key_value.bias"]
        q, k, v = np.split(y.reshape(len(x), -1, dim), [heads, heads + shared], axis=1)
        q, k = (_with_rope(part, theta, dim // 2, True) for part in (q, k))
        x = x + _attend(q, k, v, np.zeros((1, 1, 1))) @ own["self_attention.dense.weight"].T
        y = _rms(x, own["post_attention_layernorm.weight"], eps) @ own["mlp.dense_h_to_4h.weight"].T
        gate, up = np.split(y, 2, axis=-1)
        x = x + (_silu(gate) * up) @ own["mlp.dense_4h_to_h.weight"].T
    return _rms(x, w["transformer.encoder.final_layernorm.weight"], eps) @ w["transformer.output_layer.weight"].T


def _slopes(heads: int) -> np.ndarray:
    """ALiBi's slopes (arXiv 2108.12409, section 3; for other numbers than powers of two, its published code)."""
    power = 2 ** int(np.floor(np.log2(heads)))
    first = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * power, 2)]
    return np.array((first + between)[:heads])


def baichuan(case: FamilyCase, tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V]."""
    c, w = case.config, {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    heads, eps = c["num_attention_heads"], c["rms_norm_eps"]
    rotary, places = "max_position_embeddings" in c, np.arange(len(tokens))
    bias = np.zeros((1, 1, 1)) if rotary else _slopes(heads)[:, None, None] * (places - places[:, None])
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        own = {name.split(".", 3)[3]: x for name, x in w.items() if name.startswith(f"model.layers.{i}.")}
        y = _rms(x, own["input_layernorm.weight"], eps) @ own["self_attn.W_pack.weight"].T
        q, k, v = (part.reshape(len(x), heads, -1) for part in np.split(y, 3, axis=-1))
        if rotary:
            q, k = (_with_rope(part, 10000.0, part.shape[-1], False) for part in (q, k))
        x = x + _attend(q, k, v, bias) @ own["self_attn.o_proj.weight"].T
        y = _rms(x, own["post_attention_layernorm.weight"], eps)
        y = _silu(y @ own["mlp.gate_proj.weight"].T) * (y @ own["mlp.up_proj.weight"].T)
        x = x + y @ own["mlp.down_proj.weight"].T
    head = w["lm_head.weight"]
    if c["vocab_size"] != 64000:
        head = head / np.sqrt((head * head).sum(-1, keepdims=True))
    return _rms(x, w["model.norm.weight"], eps) @ head.T
