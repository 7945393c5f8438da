"""MPT: ALiBi, layer norms without biases, a plain GELU MLP, no biases, tied embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.settings import layer_count, refuse, refuse_quantised, size, whole
from kvjax.checkpoints.families.weight_names import Layout, weights_of
from kvjax.errors import WeightsError
from kvjax.model.config import ModelConfig


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    refuse_quantised(config, origin)
    attention = config.get("attn_config") or {}
    refuse(attention, origin, "clip_qkv", "qk_ln", "prefix_lm", "rope")
    refuse(config, origin, "logit_scale")
    if not attention.get("alibi", True) or attention.get("alibi_bias_max", 8) != 8:
        raise WeightsError(f"{origin} asks for learned positions or other slopes; an MPT model's ALiBi goes up to 8.")
    if attention.get("attn_type", "multihead_attention") != "multihead_attention" or not config.get("no_bias", True):
        raise WeightsError(f"{origin} shares keys among heads or has biases, which an MPT model does not.")
    hidden, heads = size(config, origin, "d_model"), size(config, origin, "n_heads")
    if hidden % heads:
        raise WeightsError(f"{origin} asks for {heads} heads in {hidden} channels, which do not divide evenly.")
    scale = attention.get("softmax_scale")
    return ModelConfig(
        family="mpt",
        vocab_size=size(config, origin, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=layer_count(config, origin, "n_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position=whole(config.get("max_seq_len") or 2048, "max_seq_len", origin),
        rms_norm_eps=float(config.get("layer_norm_epsilon", 1e-5)),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        positional="alibi",
        norm="layer",
        norm_bias=False,
        mlp="gelu_exact",
        attention_multiplier=None if scale is None else float(scale),
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


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    return weights_of(config, _LAYOUT)


MPT = Family(_from_hf, None, _weights, optional_prefix="transformer.")
