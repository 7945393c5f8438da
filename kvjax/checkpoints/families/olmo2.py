"""OLMo 2 and 3: norms of what attention and the MLP give, and of all heads' queries and keys (arXiv 2501.00656)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf
from kvjax.checkpoints.families.sliding import (
    all_but_every,
    slides_from_gguf,
    windows_from_hf,
    with_ropes,
    with_window_rope,
)
from kvjax.checkpoints.families.weight_names import GGUF, LLAMA_LAYOUT, weights_of
from kvjax.model.config import ModelConfig, RopeConfig

_FEATURES: dict[str, Any] = {"norm_order": "post", "qk_norm_across_heads": True}


def _from_hf(config: Mapping[str, Any], origin: str, **more: Any) -> ModelConfig:
    bias = bool(config.get("attention_bias"))
    features = {"qkv_bias": bias, "output_bias": bias, **_FEATURES, **more}
    return config_from_hf(config, origin, context=2048, epsilon=("rms_norm_eps", 1e-5), **features)


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    """OLMo 2, or OLMo 3, whose files have windows and are called "olmo2" too."""
    slides = slides_from_gguf(metadata, "olmo2", all_but_every(4), origin)
    found = config_from_gguf(metadata, shapes, factors, origin, slides=slides, idle=True, **_FEATURES)
    if not found.sliding:
        return found
    return with_window_rope(dataclasses.replace(found, family="olmo3"), RopeConfig(theta=found.rope.theta))


def _third_from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    """OLMo 3: windows in all layers but every fourth, whose rotary embedding alone is scaled."""
    windows = windows_from_hf(config, origin, 2048, window=4096, default=all_but_every(4), idle=True)
    theta = config.get("rope_theta") or 500000.0
    return with_ropes(lambda own: _from_hf(own, origin, windows=windows), config, origin, theta, theta)


_POST = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
_LAYOUT = dataclasses.replace(LLAMA_LAYOUT, norms=dict(LLAMA_LAYOUT.norms) | _POST)


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    return weights_of(config, GGUF if gguf else _LAYOUT)


OLMO2 = Family(_from_hf, _from_gguf, _weights)
OLMO3 = Family(_third_from_hf, None, _weights)
