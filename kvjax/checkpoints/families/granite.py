"""Granite 3: llama's layout with factors of embeddings, residuals, attention and logits."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf, decoder_weights
from kvjax.checkpoints.families.settings import gguf_keys
from kvjax.model.config import ModelConfig


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    bias = bool(config.get("attention_bias"))
    return config_from_hf(
        config,
        origin,
        context=2048,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias")),
        attention_multiplier=float(config.get("attention_multiplier", 1)),
        embedding_scale=float(config.get("embedding_multiplier", 1)),
        residual_scale=float(config.get("residual_multiplier", 1)),
        logit_scale=1 / float(config.get("logits_scaling", 1)),
    )


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    key = gguf_keys(metadata, "granite", origin)
    scales: dict[str, Any] = {"attention_multiplier": float(key("attention.scale"))}
    scales["embedding_scale"] = float(key("embedding_scale", 1.0))
    scales["residual_scale"] = float(key("residual_scale", 1.0))
    scales["logit_scale"] = 1 / float(key("logit_scale", 1.0))
    return config_from_gguf(metadata, shapes, factors, origin, **scales)


GRANITE = Family(_from_hf, _from_gguf, functools.partial(decoder_weights, permuted=True))
