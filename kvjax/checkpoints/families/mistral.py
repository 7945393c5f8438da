"""Mistral: llama's layout, without sliding windows. A GGUF calls it a llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family
from kvjax.checkpoints.families.llama import config_from_hf, decoder_weights
from kvjax.checkpoints.families.settings import refuse_window
from kvjax.model.config import ModelConfig


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    # transformers' MistralConfig slides a window of 4096 tokens unless the file says null.
    refuse_window({"sliding_window": 4096, **config}, origin, 131072)
    return config_from_hf(config, origin, context=131072)


MISTRAL = Family(_from_hf, None, decoder_weights)
