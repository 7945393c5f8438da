"""Baichuan 1 and 2: llama's block with one fused projection; the 13B models have ALiBi (arXiv 2309.10305).

Baichuan 2 normalises the rows of its output head (section 2.3), here as they are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf
from kvjax.checkpoints.families.settings import gguf_keys
from kvjax.checkpoints.families.weight_names import GGUF, LLAMA_LAYOUT, weights_of
from kvjax.errors import WeightsError
from kvjax.model.config import ModelConfig

#: Tokens of Baichuan 1, whose head is an ordinary one.
_FIRST_VOCABULARY = 64000
#: Layers of the models with rotary embedding, and of those with ALiBi.
_ROTARY, _ALIBI = 32, 40


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    """The 13B models' files have no ``max_position_embeddings``: no position is embedded."""
    rotary = config.get("max_position_embeddings") is not None
    context = config.get("model_max_length")
    return config_from_hf(
        config,
        origin,
        context=context if isinstance(context, int) else 4096,
        positional="rope" if rotary else "alibi",
    )


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    """The configuration; no key names the positional embedding: 32 layers have RoPE (7B), 40 have ALiBi (13B)."""
    layers = gguf_keys(metadata, "baichuan", origin)("block_count", count=True)
    if layers not in (_ROTARY, _ALIBI):
        raise WeightsError(
            f"{origin} is a baichuan of {layers} layers; {_ROTARY} (7B, rotary embedding) and {_ALIBI} (13B, ALiBi) "
            "are known, and no key says which a model has."
        )
    positional = "rope" if layers == _ROTARY else "alibi"
    return config_from_gguf(metadata, shapes, factors, origin, positional=positional)


def _unit_rows(rows: np.ndarray) -> np.ndarray:
    """Rows of length 1, as the reference's ``normalize`` makes them."""
    wide = rows.astype(np.float32)
    return wide / np.maximum(np.sqrt((wide * wide).sum(axis=1, keepdims=True)), 1e-12)


_FIRST = dataclasses.replace(LLAMA_LAYOUT, qkv="self_attn.W_pack")
_SECOND = dataclasses.replace(_FIRST, change_head=_unit_rows)


#: llama.cpp permutes queries and keys as a llama's, also in models with ALiBi, which have no rotary embedding.
_GGUF_FIRST = dataclasses.replace(GGUF, pairs="neighbours")
_GGUF_SECOND = dataclasses.replace(_GGUF_FIRST, change_head=_unit_rows)


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    first, second = (_GGUF_FIRST, _GGUF_SECOND) if gguf else (_FIRST, _SECOND)
    return weights_of(config, first if config.vocab_size == _FIRST_VOCABULARY else second)


BAICHUAN = Family(_from_hf, _from_gguf, _weights)
