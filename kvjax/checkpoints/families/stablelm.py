"""StableLM: llama's block with layer norms and partial rotary embedding (arXiv 2402.17834, section 2).

StableLM 2 12B has a parallel block, and norms of each head's queries and keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf
from kvjax.checkpoints.families.settings import gguf_keys
from kvjax.checkpoints.families.weight_names import GGUF, LLAMA_LAYOUT, weights_of
from kvjax.model.config import ModelConfig


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    parallel = bool(config.get("use_parallel_residual"))
    return config_from_hf(
        config,
        origin,
        context=4096,
        epsilon=("layer_norm_eps", 1e-5),
        partial=0.25,
        qkv_bias=bool(config.get("use_qkv_bias")),
        norm="layer",
        qk_norm_by_head=bool(config.get("qk_layernorm")),
        parallel_block=parallel,
        shared_norm=parallel,
    )


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    parallel = bool(gguf_keys(metadata, "stablelm", origin)("use_parallel_residual", False))
    features: dict[str, Any] = {"norm": "layer", "parallel_block": parallel, "shared_norm": parallel}
    features["qk_norm_by_head"] = "blk.0.attn_q_norm.weight" in shapes
    return config_from_gguf(metadata, shapes, factors, origin, partial=True, **features)


_BY_HEAD = {"q_norm": "self_attn.q_layernorm.norms.{}", "k_norm": "self_attn.k_layernorm.norms.{}"}
_LAYOUT = dataclasses.replace(LLAMA_LAYOUT, norms=dict(LLAMA_LAYOUT.norms) | _BY_HEAD)


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    return weights_of(config, GGUF if gguf else _LAYOUT)


STABLELM = Family(_from_hf, _from_gguf, _weights)
