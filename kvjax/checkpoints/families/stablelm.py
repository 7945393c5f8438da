"""StableLM: llama's block with layer norms and partial rotary embedding; a parallel block in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family
from kvjax.checkpoints.families.llama import config_from_hf, decoder_weights
from kvjax.checkpoints.families.settings import refuse
from kvjax.model.config import ModelConfig


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    refuse(config, origin, "qk_layernorm")
    parallel = bool(config.get("use_parallel_residual"))
    return config_from_hf(
        config,
        origin,
        context=4096,
        epsilon=("layer_norm_eps", 1e-5),
        partial=0.25,
        qkv_bias=bool(config.get("use_qkv_bias")),
        norm="layer",
        parallel_block=parallel,
        shared_norm=parallel,
    )


STABLELM = Family(_from_hf, None, decoder_weights)
