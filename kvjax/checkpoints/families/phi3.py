"""Phi-3, 3.5, 4 and 4-mini: llama's block with fused projections, longrope and partial rotary embedding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf
from kvjax.checkpoints.families.sliding import every_layer, windows_from_hf
from kvjax.checkpoints.families.weight_names import GGUF, LLAMA_LAYOUT, weights_of
from kvjax.model.config import ModelConfig


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    windows = windows_from_hf(config, origin, 4096)
    return config_from_hf(config, origin, context=4096, epsilon=("rms_norm_eps", 1e-5), partial=1.0, windows=windows)


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    return config_from_gguf(metadata, shapes, factors, origin, partial=True, slides=every_layer)


_GGUF = dataclasses.replace(GGUF, qkv="attn_qkv", gate_up="ffn_up")
_LAYOUT = dataclasses.replace(LLAMA_LAYOUT, qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    return weights_of(config, _GGUF if gguf else _LAYOUT)


PHI3 = Family(_from_hf, _from_gguf, _weights)
