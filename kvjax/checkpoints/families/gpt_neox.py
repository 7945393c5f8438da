"""GPT-NeoX and Pythia: a parallel block, two layer norms, exact GELU, partial rotary embedding (arXiv 2204.06745)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf
from kvjax.checkpoints.families.settings import GELU, gguf_keys
from kvjax.checkpoints.families.weight_names import GGUF, Layout, weights_of
from kvjax.model.config import ModelConfig


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    bias = bool(config.get("attention_bias", True))
    # Published files have names of their own for two rotary settings.
    own = {"rope_theta": config.get("rotary_emb_base"), "partial_rotary_factor": config.get("rotary_pct")}
    return config_from_hf(
        {**{key: value for key, value in own.items() if value is not None}, **config},
        origin,
        context=2048,
        epsilon=("layer_norm_eps", 1e-5),
        activations=GELU,
        partial=0.25,
        norm="layer",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        parallel_block=bool(config.get("use_parallel_residual", True)),
    )


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    parallel = bool(gguf_keys(metadata, "gptneox", origin)("use_parallel_residual", True))
    features: dict[str, Any] = {"norm": "layer", "mlp": "gelu_exact", "parallel_block": parallel}
    return config_from_gguf(metadata, shapes, factors, origin, family="gpt_neox", partial=True, **features)


#: llama.cpp's converter puts all queries before all keys before all values.
_GGUF = dataclasses.replace(GGUF, qkv="attn_qkv")
_LAYOUT = Layout(
    layer="gpt_neox.layers.{}.",
    embedding="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    qkv="attention.query_key_value",
    fused="by head",
    out="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    return weights_of(config, _GGUF if gguf else _LAYOUT)


GPT_NEOX = Family(_from_hf, _from_gguf, _weights)
