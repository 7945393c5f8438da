"""BLOOM's layout: ALiBi, layer norms, a plain GELU MLP, biases everywhere, tied embeddings that go through a norm.

BLOOM: Le Scao et al., arXiv 2211.05100, section 3.2; its files as transformers and llama.cpp write them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.settings import checked_layers, gguf_keys, layer_count, refuse_quantised, size, whole
from kvjax.checkpoints.families.weight_names import GGUF, Layout, weights_of
from kvjax.errors import WeightsError, quoted
from kvjax.model.config import ModelConfig


def _config(
    *,
    origin: str,
    vocabulary: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    context: int,
    epsilon: float,
    tied: bool,
) -> ModelConfig:
    if hidden % heads:
        raise WeightsError(f"{origin} asks for {heads} heads in {hidden} channels, which do not divide evenly.")
    return ModelConfig(
        family="bloom",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position=context,
        rms_norm_eps=epsilon,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_embeddings=tied,
        positional="alibi",
        norm="layer",
        mlp="gelu",
        embedding_norm=True,
    )


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    """transformers' BloomConfig with its defaults; sizes have an old and a new name."""
    if config.get("apply_residual_connection_post_layernorm"):
        raise WeightsError(
            f"{origin} adds residuals after their norm (apply_residual_connection_post_layernorm), "
            "which is not supported."
        )
    refuse_quantised(config, origin)
    hidden = size(config, origin, "hidden_size", "n_embed")
    inner = config.get("n_inner") or 4 * hidden
    if inner != 4 * hidden:
        raise WeightsError(
            f"{origin} has {quoted(inner)} as its n_inner; a bloom's is {4 * hidden}, 4 times hidden_size."
        )
    return _config(
        origin=origin,
        vocabulary=size(config, origin, "vocab_size"),
        hidden=hidden,
        inner=inner,
        layers=layer_count(config, origin, "num_hidden_layers", "n_layer"),
        heads=size(config, origin, "num_attention_heads", "n_head"),
        # ALiBi reads past any length; this is what the model was trained on.
        context=whole(config.get("seq_length") or 2048, "seq_length", origin),
        epsilon=float(config.get("layer_norm_epsilon", 1e-5)),
        tied=bool(config.get("tie_word_embeddings", True)),
    )


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    """llama.cpp's keys; its converter writes the tied head a second time, and then it is a head of its own."""
    key = gguf_keys(metadata, "bloom", origin)
    heads = key("attention.head_count", count=True)
    if key("attention.head_count_kv", heads, count=True) != heads:
        raise WeightsError(f"{origin} shares keys among heads, which a bloom model does not.")
    return _config(
        origin=origin,
        vocabulary=key("vocab_size", shapes.get("token_embd.weight", (0,))[0] or None, count=True),
        hidden=key("embedding_length", count=True),
        inner=key("feed_forward_length", count=True),
        layers=checked_layers(key("block_count", count=True), origin),
        heads=heads,
        context=key("context_length", count=True),
        epsilon=float(key("attention.layer_norm_epsilon")),
        tied="output.weight" not in shapes,
    )


_HF = Layout(
    layer="transformer.h.{}.",
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    norm="transformer.ln_f",
    qkv="self_attention.query_key_value",
    fused="by head",
    out="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
#: llama.cpp's converter puts all queries before all keys before all values.
_GGUF = dataclasses.replace(GGUF, qkv="attn_qkv")


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    return weights_of(config, _GGUF if gguf else _HF)


#: The published checkpoints were saved from the model without its head, whose names begin at "h.0".
BLOOM = Family(_from_hf, _from_gguf, _weights, optional_prefix="transformer.")
