"""Cohere's Command R and R7B: a parallel block, one norm without bias, pairs of rotary channels, scaled logits.

Command R+ has norms of each head's queries and keys too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf
from kvjax.checkpoints.families.settings import checked_size, gguf_keys
from kvjax.checkpoints.families.sliding import Slides, all_but_every, sliding_layers, windows_from_hf
from kvjax.checkpoints.families.weight_names import GGUF, LLAMA_LAYOUT, weights_of
from kvjax.model.config import ModelConfig

_FEATURES: dict[str, Any] = {"norm": "layer", "norm_bias": False, "parallel_block": True, "shared_norm": True}


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    bias = bool(config.get("attention_bias"))
    return config_from_hf(
        {"rope_theta": 500000.0, **config},
        origin,
        context=8192,
        epsilon=("layer_norm_eps", 1e-5),
        tied=True,
        qkv_bias=bias,
        output_bias=bias,
        logit_scale=float(config.get("logit_scale", 0.0625)),
        qk_norm_by_head=bool(config.get("use_qk_norm")),
        **_FEATURES,
    )


def _command_r_from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    """Command R and R+, whose first files have their context as ``model_max_length``, and 8192 positions."""
    trained = config.get("model_max_length")
    if trained is not None:
        config = {**config, "max_position_embeddings": checked_size(trained, "model_max_length", origin)}
    return _from_hf(config, origin)


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    scale = float(gguf_keys(metadata, "command-r", origin)("logit_scale"))
    features = {"logit_scale": scale, "qk_norm_by_head": "blk.0.attn_q_norm.weight" in shapes, **_FEATURES}
    return config_from_gguf(metadata, shapes, factors, origin, family="cohere", **features)


def _second_from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    """Command R7B and A: windows in all layers but every fourth, and rotary embedding in these alone."""
    slides = sliding_layers(config, origin, _second(config))
    windows = windows_from_hf(config, origin, 8192, window=4096, default=_second(config))
    has_window = config.get("sliding_window", 4096) is not None
    no_rotary = tuple(layer for layer, each in enumerate(slides) if not (each and has_window))
    found = _from_hf({"rope_theta": 10000.0, **config}, origin)
    return dataclasses.replace(found, windows=windows, no_rotary_layers=no_rotary)


def _second(config: Mapping[str, Any]) -> Slides:
    return all_but_every(config.get("sliding_window_pattern") or 4)


def _second_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    scale, slides = float(gguf_keys(metadata, "cohere2", origin)("logit_scale")), all_but_every(4)
    found = config_from_gguf(metadata, shapes, factors, origin, slides=slides, logit_scale=scale, **_FEATURES)
    no_rotary = tuple(layer for layer in range(found.num_layers) if not slides(layer))
    return dataclasses.replace(found, no_rotary_layers=no_rotary)


_GGUF = dataclasses.replace(GGUF, pairs="neighbours")
_LAYOUT = dataclasses.replace(LLAMA_LAYOUT, pairs="neighbours")


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    return weights_of(config, _GGUF if gguf else _LAYOUT)


COHERE = Family(_command_r_from_hf, _from_gguf, _weights)
COHERE2 = Family(_second_from_hf, _second_from_gguf, _weights)
