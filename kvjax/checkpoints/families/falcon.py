"""Falcon: a parallel block with one layer norm or two, one or several KV heads, exact GELU (arXiv 2311.16867)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf
from kvjax.checkpoints.families.settings import GELU, layer_count, refuse, size
from kvjax.checkpoints.families.weight_names import GGUF, LLAMA_NORMS, Layout, weights_of
from kvjax.errors import WeightsError
from kvjax.model.config import ModelConfig


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    refuse(config, origin, "alibi")  # whose biases are divided by sqrt(head_dim) too
    newer, heads = bool(config.get("new_decoder_architecture")), size(config, origin, "num_attention_heads", "n_head")
    norms = config.get("num_ln_in_parallel_attn")
    shared = (norms or 2) == 1 if newer else True
    parallel = newer or bool(config.get("parallel_attn", True))
    hidden = size(config, origin, "hidden_size", "n_embed")
    if hidden % heads:
        raise WeightsError(f"{origin} asks for {heads} heads in {hidden} channels, which do not divide evenly.")
    bias = bool(config.get("bias"))
    one = not newer and bool(config.get("multi_query", True))
    own = {
        "num_attention_heads": heads,
        "num_hidden_layers": layer_count(config, origin, "num_hidden_layers", "n_layer"),
        "num_key_value_heads": 1 if one else (config.get("num_kv_heads") or heads) if newer else heads,
        "intermediate_size": config.get("ffn_hidden_size") or 4 * hidden,
        "hidden_act": config.get("activation"),
    }
    return config_from_hf(
        {**config, **own},
        origin,
        context=2048,
        epsilon=("layer_norm_epsilon", 1e-5),
        activations=GELU,
        tied=True,
        norm="layer",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        parallel_block=parallel,
        shared_norm=parallel and shared,
    )


#: One norm is the input's; two are named for what reads them.
_ONE = Layout(
    layer="transformer.h.{}.",
    embedding="transformer.word_embeddings",
    norm="transformer.ln_f",
    qkv="self_attention.query_key_value",
    fused="by head",
    out="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    norms=LLAMA_NORMS,
)
_TWO = dataclasses.replace(_ONE, norms={"input_norm": "ln_attn", "post_attention_norm": "ln_mlp"})


#: llama.cpp calls the MLP's norm by the name that the only one has.
_GGUF_ONE = dataclasses.replace(GGUF, qkv="attn_qkv")
_GGUF_TWO = dataclasses.replace(_GGUF_ONE, norms={"input_norm": "attn_norm_2", "post_attention_norm": "attn_norm"})


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    """Models with a parallel block, which are all that llama.cpp knows."""
    features = {"norm": "layer", "mlp": "gelu_exact", "parallel_block": True}
    shared = "blk.0.attn_norm_2.weight" not in shapes
    return config_from_gguf(metadata, shapes, factors, origin, shared_norm=shared, **features)


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    one, two = (_GGUF_ONE, _GGUF_TWO) if gguf else (_ONE, _TWO)
    return weights_of(config, two if config.parallel_block and not config.shared_norm else one)


FALCON = Family(_from_hf, _from_gguf, _weights, optional_prefix="transformer.")
