"""Phi-1, 1.5 and 2: a parallel block with one layer norm, GELU, biases everywhere, partial rotary embedding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf
from kvjax.checkpoints.families.settings import refuse
from kvjax.checkpoints.families.weight_names import GGUF, Layout, weights_of
from kvjax.model.config import ModelConfig

_FEATURES: dict[str, Any] = {"norm": "layer", "parallel_block": True, "shared_norm": True}


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    refuse(config, origin, "qk_layernorm")
    return config_from_hf(
        config,
        origin,
        context=2048,
        epsilon=("layer_norm_eps", 1e-5),
        activations={"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"},
        partial=0.5,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        **_FEATURES,
    )


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    features = {"mlp": "gelu", "head_bias": True, **_FEATURES}
    return config_from_gguf(metadata, shapes, factors, origin, family="phi", partial=True, **features)


_LAYOUT = Layout(out="self_attn.dense", up="mlp.fc1", down="mlp.fc2", norm="model.final_layernorm")


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    return weights_of(config, GGUF if gguf else _LAYOUT)


PHI = Family(_from_hf, _from_gguf, _weights)
