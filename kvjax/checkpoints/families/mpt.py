"""MPT: ALiBi, layer norms without biases, a plain GELU MLP, no biases, tied embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.settings import (
    checked_layers,
    gguf_keys,
    layer_count,
    refuse,
    refuse_quantised,
    size,
    whole,
)
from kvjax.checkpoints.families.weight_names import GGUF, Layout, weights_of
from kvjax.errors import WeightsError, quoted
from kvjax.model.config import ModelConfig

#: The largest slope's exponent that the ALiBi of every published model goes up to.
_SLOPES = 8


def _config(
    *,
    origin: str,
    vocabulary: int,
    hidden: int,
    layers: int,
    heads: int,
    context: int,
    epsilon: float,
    tied: bool,
    scale: float | None = None,
) -> ModelConfig:
    if hidden % heads:
        raise WeightsError(f"{origin} asks for {heads} heads in {hidden} channels, which do not divide evenly.")
    return ModelConfig(
        family="mpt",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position=context,
        rms_norm_eps=epsilon,
        tie_embeddings=tied,
        positional="alibi",
        norm="layer",
        norm_bias=False,
        mlp="gelu_exact",
        attention_multiplier=scale,
    )


def _check_alibi(slopes: Any, origin: str) -> None:
    """WeightsError for ALiBi that goes up to another exponent than the published models', or is switched off (0)."""
    if slopes != _SLOPES:
        raise WeightsError(
            f"{origin} asks for learned positions or other slopes; an MPT model's ALiBi goes up to {_SLOPES}."
        )


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    refuse_quantised(config, origin)
    attention = config.get("attn_config") or {}
    refuse(attention, origin, "clip_qkv", "qk_ln", "prefix_lm", "rope")
    refuse(config, origin, "logit_scale")
    _check_alibi(attention.get("alibi_bias_max", _SLOPES) if attention.get("alibi", True) else 0, origin)
    if attention.get("attn_type", "multihead_attention") != "multihead_attention" or not config.get("no_bias", True):
        raise WeightsError(f"{origin} shares keys among heads or has biases, which an MPT model does not.")
    scale = attention.get("softmax_scale")
    return _config(
        origin=origin,
        vocabulary=size(config, origin, "vocab_size"),
        hidden=size(config, origin, "d_model"),
        layers=layer_count(config, origin, "n_layers"),
        heads=size(config, origin, "n_heads"),
        context=whole(config.get("max_seq_len") or 2048, "max_seq_len", origin),
        epsilon=float(config.get("layer_norm_epsilon", 1e-5)),
        tied=bool(config.get("tie_word_embeddings", True)),
        scale=None if scale is None else float(scale),
    )


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    """llama.cpp's keys; its converter once wrote the tied head a second time, and then it is a head of its own."""
    key = gguf_keys(metadata, "mpt", origin)
    hidden, heads = key("embedding_length", count=True), key("attention.head_count", count=True)
    # The converter writes 0 for models without ALiBi.
    _check_alibi(key("attention.max_alibi_bias", 0), origin)
    if clip := key("attention.clamp_kqv", 0):
        raise WeightsError(f"{origin} asks for clamp_kqv ({quoted(clip)}), which is not supported.")
    if key("attention.head_count_kv", heads, count=True) != heads:
        raise WeightsError(f"{origin} shares keys among heads, which an MPT model does not.")
    if key("feed_forward_length", 4 * hidden, count=True) != 4 * hidden:
        raise WeightsError(f"{origin} has an MLP of other than 4 times its width, which an MPT model does not.")
    return _config(
        origin=origin,
        vocabulary=key("vocab_size", shapes.get("token_embd.weight", (0,))[0] or None, count=True),
        hidden=hidden,
        layers=checked_layers(key("block_count", count=True), origin),
        heads=heads,
        context=key("context_length", count=True),
        epsilon=float(key("attention.layer_norm_epsilon")),
        tied="output.weight" not in shapes,
    )


_LAYOUT = Layout(
    layer="transformer.blocks.{}.",
    embedding="transformer.wte",
    norm="transformer.norm_f",
    qkv="attn.Wqkv",
    out="attn.out_proj",
    up="ffn.up_proj",
    down="ffn.down_proj",
    norms={"input_norm": "norm_1", "post_attention_norm": "norm_2"},
)


_GGUF = dataclasses.replace(GGUF, qkv="attn_qkv")


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    return weights_of(config, _GGUF if gguf else _LAYOUT)


MPT = Family(_from_hf, _from_gguf, _weights, optional_prefix="transformer.")
