"""StarCoder2: layer norms, a plain GELU MLP, biases everywhere (arXiv 2402.19173, section 6)."""

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
    biased = bool(config.get("use_bias", True))
    return config_from_hf(
        {"num_key_value_heads": 2, **config},
        origin,
        context=4096,
        epsilon=("norm_epsilon", 1e-5),
        activations={"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu": "gelu_exact"},
        tied=True,
        norm="layer",
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        windows=windows_from_hf(config, origin, 4096),
    )


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    return config_from_gguf(metadata, shapes, factors, origin, slides=every_layer, norm="layer", mlp="gelu")


_LAYOUT = dataclasses.replace(LLAMA_LAYOUT, up="mlp.c_fc", down="mlp.c_proj")


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    return weights_of(config, GGUF if gguf else _LAYOUT)


STARCODER2 = Family(_from_hf, _from_gguf, _weights)
