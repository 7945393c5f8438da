"""SmolLM3: llama's layout, of whose layers every fourth has no rotary embedding (NoPE, arXiv 2501.18795)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf, decoder_weights
from kvjax.checkpoints.families.settings import layer_count, whole
from kvjax.checkpoints.families.sliding import windows_from_hf
from kvjax.errors import WeightsError
from kvjax.model.config import ModelConfig


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    bias, without = bool(config.get("attention_bias")), _without_rotary(config, origin)
    # As in transformers: where the file does not say, a window is of the layers without rotary embedding.
    slides = config.get("use_sliding_window")
    windows = windows_from_hf(config, origin, 32768, default=lambda layer: layer in without) if slides else ()
    return config_from_hf(
        {"rope_theta": 2000000.0, "num_key_value_heads": 4, **config},
        origin,
        context=32768,
        tied=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias")),
        no_rotary_layers=without,
        windows=windows,
    )


def _without_rotary(config: Mapping[str, Any], origin: str) -> tuple[int, ...]:
    """Layers without rotary embedding: those marked 0 in ``no_rope_layers``, else every fourth (or what is said)."""
    layers = layer_count(config, origin)
    marks = config.get("no_rope_layers")
    if marks is None:
        every = whole(config.get("no_rope_layer_interval") or 4, "no_rope_layer_interval", origin)
        return tuple(range(every - 1, layers, every))
    if not isinstance(marks, list) or len(marks) != layers:
        raise WeightsError(f"{origin} lists no_rope_layers for other than its {layers} layers.")
    return tuple(i for i, mark in enumerate(marks) if not mark)


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    """llama.cpp, too, has no key for the layers without rotary embedding: every fourth."""
    found = config_from_gguf(metadata, shapes, factors, origin)
    return dataclasses.replace(found, no_rotary_layers=tuple(range(3, found.num_layers, 4)))


SMOLLM3 = Family(_from_hf, _from_gguf, functools.partial(decoder_weights, permuted=True))
