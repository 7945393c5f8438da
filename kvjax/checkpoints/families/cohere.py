"""Cohere's Command R: a parallel block, one layer norm without bias, neighbouring rotary channels, scaled logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.layout import GGUF, LLAMA_LAYOUT, weights_of
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf
from kvjax.checkpoints.families.settings import gguf_keys, refuse
from kvjax.errors import WeightsError
from kvjax.model.config import ModelConfig

_FEATURES: dict[str, Any] = {"norm": "layer", "norm_bias": False, "parallel_block": True, "shared_norm": True}


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    refuse(config, origin, "use_qk_norm")
    bias = bool(config.get("attention_bias"))
    return config_from_hf(
        {"rope_theta": 500000.0, **config},
        origin,
        context=8192,
        epsilon=("layer_norm_eps", 1e-5),
        tied=True,
        qkv_bias=bias,
        output_bias=bias,
        logit_scale=float(config.get("logit_scale", 0.0625)),
        **_FEATURES,
    )


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    scale = float(gguf_keys(metadata, "command-r", origin)("logit_scale"))
    if "blk.0.attn_q_norm.weight" in shapes:
        raise WeightsError(f"{origin} norms queries and keys (use_qk_norm), which is not supported.")
    return config_from_gguf(metadata, shapes, factors, origin, family="cohere", logit_scale=scale, **_FEATURES)


_GGUF = dataclasses.replace(GGUF, pairs="neighbours")
_LAYOUT = dataclasses.replace(LLAMA_LAYOUT, pairs="neighbours")


def _weights(config: ModelConfig, gguf: bool) -> Iterator[Weight]:
    return weights_of(config, _GGUF if gguf else _LAYOUT)


COHERE = Family(_from_hf, _from_gguf, _weights)
