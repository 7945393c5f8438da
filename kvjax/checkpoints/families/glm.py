"""GLM-4: partial rotary embedding of neighbouring channels, biases of queries, keys and values, a fused MLP.

Three kinds of file: transformers' "glm" (GLM-4-9B) and "glm4" (GLM-4-0414, with norms before and after), and
"chatglm", GLM-4-9B as it was first published, with names of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf
from kvjax.checkpoints.families.settings import layer_count, refuse, refuse_quantised, size
from kvjax.checkpoints.families.weight_names import GGUF, LLAMA_LAYOUT, LLAMA_NORMS, Layout, weights_of
from kvjax.errors import WeightsError
from kvjax.model.config import ModelConfig, RopeConfig


def _from_hf(config: Mapping[str, Any], origin: str, **features: Any) -> ModelConfig:
    return config_from_hf(
        {"head_dim": 128, "num_key_value_heads": 2, **config},
        origin,
        context=131072,
        epsilon=("rms_norm_eps", 1.5625e-7),
        partial=0.5,
        qkv_bias=bool(config.get("attention_bias", True)),
        **features,
    )


def _from_glm4(config: Mapping[str, Any], origin: str) -> ModelConfig:
    return _from_hf(config, origin, norm_order="both")


_GLM = dataclasses.replace(LLAMA_LAYOUT, gate_up="mlp.gate_up_proj", pairs="neighbours")
_POST = {"attention_output_norm": "post_self_attn_layernorm", "mlp_output_norm": "post_mlp_layernorm"}
_GLM4 = dataclasses.replace(_GLM, norms=LLAMA_NORMS | _POST)


#: llama.cpp calls transformers' "glm" and the first publication "chatglm".
_GGUF = dataclasses.replace(GGUF, gate_up="ffn_up", pairs="neighbours")


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    order = "both" if "blk.0.post_ffw_norm.weight" in shapes else "pre"
    return config_from_gguf(metadata, shapes, factors, origin, partial=True, norm_order=order, mlp_bias=False)


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    if gguf:
        return weights_of(config, _GGUF)
    return weights_of(config, _GLM if config.norm_order == "pre" else _GLM4)


def _from_chatglm(config: Mapping[str, Any], origin: str) -> ModelConfig:
    """The keys of ChatGLM's own configuration."""
    refuse(config, origin, "apply_residual_connection_post_layernorm", "add_bias_linear", "fp32_residual_connection")
    refuse_quantised(config, origin)
    if not config.get("rmsnorm", True) or not config.get("post_layer_norm", True):
        raise WeightsError(f"{origin} asks for layer norms, or none after the last layer, which is not supported.")
    heads, dim = size(config, origin, "num_attention_heads"), size(config, origin, "kv_channels")
    shared = bool(config.get("multi_query_attention"))
    return ModelConfig(
        family="chatglm",
        vocab_size=size(config, origin, "padded_vocab_size"),
        hidden_size=size(config, origin, "hidden_size"),
        intermediate_size=size(config, origin, "ffn_hidden_size"),
        num_layers=layer_count(config, origin, "num_layers"),
        num_heads=heads,
        num_kv_heads=size(config, origin, "multi_query_group_num") if shared else heads,
        head_dim=dim,
        max_position=size(config, origin, "seq_length"),
        rope=RopeConfig(theta=10000.0 * float(config.get("rope_ratio", 1))),
        rotary_dim=dim // 2,
        rms_norm_eps=float(config.get("layernorm_epsilon", 1e-5)),
        qkv_bias=bool(config.get("add_qkv_bias")),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


_CHATGLM = Layout(
    layer="transformer.encoder.layers.{}.",
    embedding="transformer.embedding.word_embeddings",
    norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    qkv="self_attention.query_key_value",
    out="self_attention.dense",
    gate_up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    pairs="neighbours",
)


def _chatglm_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    """GLM-4-9B, whichever of its publications was converted: only that of transformers has tensors of its queries."""
    found = _from_gguf(metadata, shapes, factors, origin)
    return dataclasses.replace(found, family="glm") if "blk.0.attn_q.weight" in shapes else found


def _chatglm_weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    if gguf:
        return weights_of(config, _GGUF if config.family == "glm" else dataclasses.replace(_GGUF, qkv="attn_qkv"))
    return weights_of(config, _CHATGLM)


GLM = Family(_from_hf, None, _weights)  # a GGUF calls it chatglm
GLM4 = Family(_from_glm4, _from_gguf, _weights)
CHATGLM = Family(_from_chatglm, _chatglm_from_gguf, _chatglm_weights)
