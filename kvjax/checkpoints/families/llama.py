"""Llama's layout, also mistral's and qwen's: rotary embedding, RMS norms, a MLP gated by SiLU.

Files as transformers and llama.cpp write them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvjax.checkpoints.families.family import Family, Place, Weight, input_last, output_first, transposed, unchanged
from kvjax.checkpoints.families.settings import gguf_keys, refuse_quantised, size, whole
from kvjax.checkpoints.rope_settings import rope_from_gguf, rope_from_hf
from kvjax.errors import WeightsError, quoted
from kvjax.model.config import ModelConfig


def config_from_hf(config: Mapping[str, Any], origin: str, *, context: int, **features: Any) -> ModelConfig:
    """The keys that every llama-like ``config.json`` has, with transformers' defaults for the absent ones.

    Args:
      config: the file's content.
      origin: the file, for messages.
      context: tokens of context where the file does not say.
      features: further fields of :class:`ModelConfig`, such as ``qkv_bias``.
    """
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise WeightsError(f"{origin} asks for the activation {quoted(config['hidden_act'])}; only silu is supported.")
    refuse_quantised(config, origin)
    hidden, heads = size(config, origin, "hidden_size"), size(config, origin, "num_attention_heads")
    head_dim = whole(config.get("head_dim") or hidden // heads, "head_dim", origin)
    max_position = whole(config.get("max_position_embeddings") or context, "max_position_embeddings", origin)
    return ModelConfig(
        family=config["model_type"],
        vocab_size=size(config, origin, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=size(config, origin, "intermediate_size"),
        num_layers=size(config, origin, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=whole(config.get("num_key_value_heads") or heads, "num_key_value_heads", origin),
        head_dim=head_dim,
        max_position=max_position,
        rope=rope_from_hf(config, max_position, head_dim, origin),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        **features,
    )


def config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, Any],
    origin: str,
    **features: Any,
) -> ModelConfig:
    """GGUF keys begin with the architecture's name; biases and tying show only in which tensors are there."""
    arch = metadata["general.architecture"]
    key = gguf_keys(metadata, arch, origin)
    hidden, heads = key("embedding_length", count=True), key("attention.head_count", count=True)
    context = key("context_length", count=True)
    head_dim = key("attention.key_length", hidden // heads, count=True)
    if key("rope.dimension_count", head_dim) != head_dim or key("attention.value_length", head_dim) != head_dim:
        raise WeightsError(f"{origin} rotates only a part of each head or has narrower values, which is not supported.")
    if key("attention.sliding_window", 0) or key("expert_count", 0):
        raise WeightsError(f"{origin} asks for sliding-window attention or experts, which are not supported.")
    embedding = shapes.get("token_embd.weight", (0,))
    return ModelConfig(
        family=arch,
        vocab_size=key("vocab_size", embedding[0] or None, count=True),
        hidden_size=hidden,
        intermediate_size=key("feed_forward_length", count=True),
        num_layers=key("block_count", count=True),
        num_heads=heads,
        num_kv_heads=key("attention.head_count_kv", heads, count=True),
        head_dim=head_dim,
        max_position=context,
        rope=rope_from_gguf(metadata, arch, factors, context, head_dim, origin),
        rms_norm_eps=float(key("attention.layer_norm_rms_epsilon")),
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        tie_embeddings="output.weight" not in shapes,
        **features,
    )


def _channels(values: np.ndarray, permuted: bool) -> np.ndarray:
    """A view of [..., D] whose last axes run through the channels in the checkpoint's order.

    GGUF's llama converter stores channel i + D/2 right after channel i: [2, D/2] transposed. Splitting one axis is
    always a view, so the order is undone by where a value is written, without a copy.
    """
    if not permuted:
        return values
    return values.reshape(*values.shape[:-1], 2, values.shape[-1] // 2).swapaxes(-1, -2)


def _layer(config: ModelConfig, index: int, permuted: bool) -> Iterator[Weight]:
    hidden, inner, group = config.hidden_size, config.intermediate_size, config.group_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hf, blk, param = f"model.layers.{index}.", f"blk.{index}.", f"layers.{index}."

    def weight(hf_name: str, gguf_name: str, shape: tuple[int, ...], target: str, place: Place) -> Weight:
        return Weight(hf + hf_name, blk + gguf_name, shape, param + target, place)

    projections: tuple[tuple[str, int, Place], ...] = (
        ("q", heads, lambda values: _channels(values[..., :group, :], permuted)),
        ("k", kv_heads, lambda values: _channels(values[..., group, :], permuted)),
        ("v", kv_heads, lambda values: values[..., group + 1, :]),
    )
    for name, rows, place in projections:
        hf_name, gguf_name = f"self_attn.{name}_proj.", f"attn_{name}."
        yield weight(hf_name + "weight", gguf_name + "weight", (rows, hidden), "qkv", input_last(place))
        if config.qkv_bias:
            yield weight(hf_name + "bias", gguf_name + "bias", (rows,), "qkv_bias", place)
    for part, name in enumerate(("gate", "up")):
        half: Place = lambda values, part=part: values[..., part, :]  # noqa: E731
        hf_name, gguf_name = f"mlp.{name}_proj.", f"ffn_{name}."
        yield weight(hf_name + "weight", gguf_name + "weight", (inner, hidden), "gate_up", input_last(half))
        if config.mlp_bias:
            yield weight(hf_name + "bias", gguf_name + "bias", (inner,), "gate_up_bias", half)
    closing = (
        ("self_attn.o_proj.", "attn_output.", heads, "out", config.output_bias),
        ("mlp.down_proj.", "ffn_down.", inner, "down", config.mlp_bias),
    )
    for hf_name, gguf_name, columns, target, bias in closing:
        yield weight(hf_name + "weight", gguf_name + "weight", (hidden, columns), target, output_first)
        if bias:
            yield weight(hf_name + "bias", gguf_name + "bias", (hidden,), target + "_bias", unchanged)
    norms = (
        ("input_layernorm", "attn_norm", "input_norm"),
        ("post_attention_layernorm", "ffn_norm", "post_attention_norm"),
    )
    for hf_name, gguf_name, target in norms:
        yield weight(hf_name + ".weight", gguf_name + ".weight", (hidden,), target + ".weight", unchanged)


def decoder_weights(config: ModelConfig, gguf: bool, permuted: bool = False) -> Iterator[Weight]:
    """Every weight of the layout; ``permuted`` says that a GGUF has llama's own order of rotated channels."""
    vocabulary = (config.vocab_size, config.hidden_size)
    # A tied table is stored once, as the head.
    target, view = ("head", transposed) if config.tie_embeddings else ("embedding", unchanged)
    yield Weight("model.embed_tokens.weight", "token_embd.weight", vocabulary, target, view)
    for index in range(config.num_layers):
        yield from _layer(config, index, gguf and permuted)
    yield Weight("model.norm.weight", "output_norm.weight", (config.hidden_size,), "norm.weight", unchanged)
    if not config.tie_embeddings:
        yield Weight("lm_head.weight", "output.weight", vocabulary, "head", transposed)


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    bias, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return config_from_hf(config, origin, context=2048, qkv_bias=bias, output_bias=bias, mlp_bias=mlp)


LLAMA = Family(_from_hf, config_from_gguf, functools.partial(decoder_weights, permuted=True))
