"""StableLM: llama's block with layer norms and partial rotary embedding; a parallel block in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf, decoder_weights
from kvjax.checkpoints.families.settings import gguf_keys, refuse
from kvjax.errors import WeightsError
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


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    parallel = bool(gguf_keys(metadata, "stablelm", origin)("use_parallel_residual", False))
    if "blk.0.attn_q_norm.weight" in shapes:
        raise WeightsError(f"{origin} norms queries and keys (qk_layernorm), which is not supported.")
    features: dict[str, Any] = {"norm": "layer", "parallel_block": parallel, "shared_norm": parallel}
    return config_from_gguf(metadata, shapes, factors, origin, partial=True, **features)


STABLELM = Family(_from_hf, _from_gguf, decoder_weights)
