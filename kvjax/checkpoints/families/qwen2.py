"""Qwen2: llama's layout with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf, decoder_weights
from kvjax.checkpoints.families.sliding import qwen_windows
from kvjax.model.config import ModelConfig


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    windows = qwen_windows(config, origin, 32768)
    return config_from_hf(config, origin, context=32768, qkv_bias=True, windows=windows)


QWEN2 = Family(_from_hf, config_from_gguf, decoder_weights)
