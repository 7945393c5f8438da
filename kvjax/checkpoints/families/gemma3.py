"""Gemma 2 and 3: Gemma with norms on both sides and sliding windows (arXiv 2408.00118 and 2503.19786, section 2).

Gemma 2 bounds attention's scores and logits; Gemma 3 norms queries and keys instead, and its sliding layers have a
rotary embedding of their own. Of a multimodal checkpoint the language model is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.gemma import GEMMA_GGUF, gemma_from_gguf, gemma_from_hf
from kvjax.checkpoints.families.settings import checked_size, gguf_keys, refuse_quantised
from kvjax.checkpoints.families.sliding import all_but_every, windows_from_hf, with_ropes
from kvjax.checkpoints.families.weight_names import LLAMA_LAYOUT, weights_of
from kvjax.errors import WeightsError
from kvjax.model.config import ModelConfig

#: transformers' Gemma2Config and Gemma3TextConfig, for files that leave a size out.
_SIZES = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip
_SECOND = _SIZES | {
    "vocab_size": 256000, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256,
}  # fmt: skip
_THIRD = _SIZES | {"vocab_size": 262208, "max_position_embeddings": 131072, "query_pre_attn_scalar": 256}
_LOCAL, _GLOBAL = 10000.0, 1000000.0


def _features(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The features that both have beyond Gemma."""
    caps = (config.get(name) for name in ("attn_logit_softcapping", "final_logit_softcapping"))
    attention, logits = (None if cap is None else float(cap) for cap in caps)
    scalar = checked_size(config["query_pre_attn_scalar"], "query_pre_attn_scalar", origin)
    return {
        "norm_order": "both",
        "attention_multiplier": scalar**-0.5,
        "attention_soft_cap": attention,
        "logit_soft_cap": logits,
    }


def _second_from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    config = _SECOND | dict(config)
    windows = windows_from_hf(config, origin, 8192, window=4096, default=all_but_every(2))
    return gemma_from_hf(config, origin, windows=windows, **_features(config, origin))


def _third_from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    config = _THIRD | dict(config)
    every = checked_size(config.get("sliding_window_pattern") or 6, "sliding_window_pattern", origin)
    windows = windows_from_hf(config, origin, 131072, window=4096, default=all_but_every(every), idle=True)
    more = {"qk_norm": True, "windows": windows, **_features(config, origin)}
    return with_ropes(lambda own: gemma_from_hf(own, origin, **more), config, origin, _GLOBAL, _LOCAL)


def _text_of(config: Mapping[str, Any], origin: str) -> ModelConfig:
    """The language model of a multimodal ``config.json``."""
    refuse_quantised(config, origin)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise WeightsError(f"{origin} is a multimodal gemma3 and lacks its text_config.")
    tied = config.get("tie_word_embeddings", True)
    return _third_from_hf({"tie_word_embeddings": tied, **text, "model_type": "gemma3_text"}, origin)


def _second_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    key = gguf_keys(metadata, "gemma2", origin)
    caps = {
        "attention_soft_cap": float(key("attn_logit_softcapping", 50.0)),
        "logit_soft_cap": float(key("final_logit_softcapping", 30.0)),
    }
    given = metadata, shapes, factors, origin
    found = gemma_from_gguf(*given, slides=all_but_every(2), norm_order="both", **caps)
    return _scaled(found, largest=46)


def _third_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    key = gguf_keys(metadata, "gemma3", origin)
    metadata = {"gemma3.rope.freq_base": _GLOBAL, **metadata}
    given = metadata, shapes, factors, origin
    found = gemma_from_gguf(
        *given, slides=all_but_every(6), norm_order="both", qk_norm=True, family="gemma3_text", idle=True
    )
    local = dataclasses.replace(type(found.rope)(), theta=float(key("rope.freq_base_swa", _LOCAL)))
    if found.sliding:
        found = dataclasses.replace(found, window_rope=local)
    return _scaled(found, largest=62)


def _scaled(config: ModelConfig, largest: int) -> ModelConfig:
    """The model with its scale of attention, which no GGUF says: that of 27B goes by its width, as in llama.cpp."""
    width = config.hidden_size / config.num_heads if config.num_layers == largest else config.head_dim
    return dataclasses.replace(config, attention_multiplier=width**-0.5)


_NORMS = {
    "post_attention_norm": "pre_feedforward_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_LAYOUT = dataclasses.replace(LLAMA_LAYOUT, norms=dict(LLAMA_LAYOUT.norms) | _NORMS)


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    return weights_of(config, GEMMA_GGUF if gguf else _LAYOUT)


GEMMA2 = Family(_second_from_hf, _second_from_gguf, _weights)
GEMMA3_TEXT = Family(_third_from_hf, _third_from_gguf, _weights)
#: Names as transformers saved them before and after version 4.52.
GEMMA3 = Family(_text_of, _third_from_gguf, _weights, other_prefixes=("language_model.model.", "model.language_model."))
