"""Mixtral, Qwen2-MoE and Qwen3-MoE: mistral's and qwen's layers with experts (arXiv 2401.04088, 2407.10671)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf, decoder_weights
from kvjax.checkpoints.families.settings import checked_size, layer_count, size, whole
from kvjax.checkpoints.families.sliding import qwen_windows, windows_from_hf
from kvjax.checkpoints.families.weight_names import GGUF, LLAMA_LAYOUT, ExpertNames, weights_of
from kvjax.errors import WeightsError
from kvjax.model.config import ModelConfig
from kvjax.model.experts import Experts


def _mixtral(config: Mapping[str, Any], origin: str) -> ModelConfig:
    def setting(name: str, default: int) -> int:
        return checked_size(config.get(name, default), name, origin)

    experts = Experts(
        setting("num_local_experts", 8), setting("num_experts_per_tok", 2), size(config, origin, "intermediate_size")
    )
    windows = windows_from_hf(config, origin, 131072)
    config = {"rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, **config}
    return config_from_hf(config, origin, context=131072, windows=windows, experts=experts)


def _qwen_experts(config: Mapping[str, Any], origin: str, count: int, active: int, inner: int, shared: int) -> Experts:
    """Qwen's experts, with transformers' defaults; layers may be left out by a list or a step."""

    def setting(name: str, default: int) -> int:
        return checked_size(config.get(name) or default, name, origin)

    step, listed = setting("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(listed, list):
        raise WeightsError(f"{origin} gives other than a list of layers as its mlp_only_layers.")
    layers = layer_count(config, origin)
    left_out = {whole(layer, "mlp_only_layers", origin) for layer in listed}
    # transformers 5 writes the second name.
    experts = "num_experts" if config.get("num_experts") else "num_local_experts"
    return Experts(
        setting(experts, count),
        setting("num_experts_per_tok", active),
        setting("moe_intermediate_size", inner),
        normalised=bool(config.get("norm_topk_prob")),
        shared_inner=setting("shared_expert_intermediate_size", shared) if shared else 0,
        dense_layers=tuple(i for i in range(layers) if i in left_out or (i + 1) % step),
    )


def _qwen2(config: Mapping[str, Any], origin: str) -> ModelConfig:
    windows = qwen_windows(config, origin, 32768, below=True)
    features = {"qkv_bias": bool(config.get("qkv_bias", True)), "windows": windows}
    return config_from_hf(
        config, origin, context=32768, experts=_qwen_experts(config, origin, 60, 4, 1408, 5632), **features
    )


def _qwen3(config: Mapping[str, Any], origin: str) -> ModelConfig:
    bias, sliding = bool(config.get("attention_bias")), bool(config.get("use_sliding_window"))
    windows = windows_from_hf(config, origin, 32768, window=4096) if sliding else ()
    features = {"qkv_bias": bias, "output_bias": bias, "qk_norm": True, "windows": windows}
    experts = _qwen_experts(config, origin, 128, 8, 768, 0)
    return config_from_hf({"num_key_value_heads": 4, **config}, origin, context=32768, experts=experts, **features)


_MIXTRAL_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)


def _mixtral_weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    return weights_of(config, GGUF if gguf else dataclasses.replace(LLAMA_LAYOUT, experts=_MIXTRAL_NAMES))


MIXTRAL = Family(_mixtral, None, _mixtral_weights)  # a GGUF calls it a llama
QWEN2_MOE = Family(_qwen2, functools.partial(config_from_gguf, family="qwen2_moe", normalised=False), decoder_weights)
QWEN3_MOE = Family(
    _qwen3, functools.partial(config_from_gguf, family="qwen3_moe", normalised=True, qk_norm=True), decoder_weights
)
