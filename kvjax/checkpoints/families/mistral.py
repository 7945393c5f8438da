"""Mistral: llama's layout, without sliding windows. A GGUF calls it a llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family
from kvjax.checkpoints.families.llama import config_from_hf, decoder_weights
from kvjax.errors import WeightsError
from kvjax.model.config import ModelConfig


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    # transformers' MistralConfig slides a window of 4096 tokens unless the file says null.
    if config.get("sliding_window", 4096) is not None:
        raise WeightsError(f"{origin} asks for sliding-window attention (sliding_window), which is not supported.")
    return config_from_hf(config, origin, context=131072)


MISTRAL = Family(_from_hf, None, decoder_weights)
