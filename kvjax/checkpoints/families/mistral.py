"""Mistral and Ministral: llama's layout, in some models with sliding windows. A GGUF calls either a llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family
from kvjax.checkpoints.families.llama import config_from_hf, decoder_weights
from kvjax.checkpoints.families.sliding import windows_from_hf
from kvjax.model.config import ModelConfig


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    # transformers slides a window of 4096 tokens unless the file says null.
    windows = windows_from_hf(config, origin, 131072, window=4096)
    return config_from_hf({"num_key_value_heads": 8, **config}, origin, context=131072, windows=windows)


MISTRAL = MINISTRAL = Family(_from_hf, None, decoder_weights)
