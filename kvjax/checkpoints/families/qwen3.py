"""Qwen3: llama's layout with a norm of each head's queries and keys (technical report, arXiv 2505.09388, section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf, decoder_weights
from kvjax.checkpoints.families.sliding import qwen_windows
from kvjax.model.config import ModelConfig


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    windows = qwen_windows(config, origin, 32768)
    bias = bool(config.get("attention_bias"))
    config = {**config, "head_dim": config.get("head_dim") or 128}  # transformers' default, whatever the widths
    features = {"qkv_bias": bias, "output_bias": bias, "qk_norm": True, "windows": windows}
    return config_from_hf(config, origin, context=32768, **features)


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    return config_from_gguf(metadata, shapes, factors, origin, qk_norm=True)


QWEN3 = Family(_from_hf, _from_gguf, decoder_weights)
