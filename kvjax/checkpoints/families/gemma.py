"""Gemma: llama's layout with norms of 1 + w, scaled embeddings and GeGLU (arXiv 2403.08295, section 2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf
from kvjax.checkpoints.families.settings import refuse
from kvjax.checkpoints.families.weight_names import GGUF, LLAMA_LAYOUT, weights_of
from kvjax.model.config import MLPKind, ModelConfig

#: Files before transformers 4.39 say gelu, and mean its tanh form.
_GEGLU: Mapping[str, MLPKind] = {"gelu_pytorch_tanh": "gated_gelu", "gelu": "gated_gelu", "gelu_new": "gated_gelu"}


def gemma_from_hf(config: Mapping[str, Any], origin: str, **more: Any) -> ModelConfig:
    """A ``config.json`` of Gemma's, with ``more`` fields of :class:`ModelConfig`."""
    refuse(config, origin, "use_bidirectional_attention")
    bias = bool(config.get("attention_bias"))
    config = {**config, "head_dim": config.get("head_dim") or 256}  # transformers' default, whatever the widths
    hidden = config.get("hidden_size")
    return config_from_hf(
        config,
        origin,
        context=8192,
        activations=_GEGLU,
        tied=True,
        qkv_bias=bias,
        output_bias=bias,
        norm_offset=True,
        embedding_scale=hidden**0.5 if isinstance(hidden, int) and hidden > 0 else 1.0,
        **more,
    )


def gemma_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, Any],
    origin: str,
    **more: Any,
) -> ModelConfig:
    """A GGUF of Gemma's, with ``more`` of what :func:`config_from_gguf` takes."""
    found = config_from_gguf(metadata, shapes, factors, origin, mlp="gated_gelu", norm_offset=True, **more)
    return dataclasses.replace(found, embedding_scale=found.hidden_size**0.5)


#: llama.cpp's converter adds the 1 to the norms' weights.
GEMMA_GGUF = dataclasses.replace(GGUF, change_norm=lambda weight: weight - 1)


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    return weights_of(config, GEMMA_GGUF if gguf else LLAMA_LAYOUT)


GEMMA = Family(gemma_from_hf, gemma_from_gguf, _weights)
