"""gpt-oss: experts with biases and a clamped gate, softmaxes with a sink, windows in every other layer.

Model card arXiv 2508.10925, section 2. Its published weights have their experts as MXFP4 (``kvjax.checkpoints.mxfp4``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.llama import config_from_gguf, config_from_hf
from kvjax.checkpoints.families.settings import checked_size, size, without_mxfp4
from kvjax.checkpoints.families.sliding import all_but_every, windows_from_hf
from kvjax.checkpoints.families.weight_names import GGUF, GGUF_NORMS, LLAMA_LAYOUT, ExpertNames, weights_of
from kvjax.errors import WeightsError
from kvjax.model.config import ModelConfig
from kvjax.model.experts import Experts

_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
#: The gate's clamp, where the file does not say.
_LIMIT = 7.0


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    def setting(default: int, *names: str) -> int:
        name = next((name for name in names if config.get(name) is not None), names[0])
        return checked_size(config.get(name, default), name, origin)

    experts = Experts(
        setting(128, "num_local_experts", "num_experts"),
        setting(4, "num_experts_per_tok", "experts_per_token"),
        size(config, origin, "intermediate_size"),
        biased=True,
        limit=float(config.get("swiglu_limit", _LIMIT)),
        alpha=float(config.get("swiglu_alpha", Experts.alpha)),
    )
    windows = windows_from_hf(config, origin, 131072, window=128, default=all_but_every(2))
    bias = bool(config.get("attention_bias", True))
    own = {"rope_theta": 150000.0, "head_dim": 64, "num_key_value_heads": 8, **without_mxfp4(config)}
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        own["rope_parameters"] = _ROPE
    features = {"qkv_bias": bias, "output_bias": bias, "attention_sinks": True, "windows": windows}
    return config_from_hf(own, origin, context=131072, epsilon=("rms_norm_eps", 1e-5), experts=experts, **features)


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    """No key has the clamp, nor that the ramp of rotary scaling is not rounded: both are the same in all models."""
    found = config_from_gguf(
        metadata, shapes, factors, origin, family="gpt_oss", slides=all_but_every(2), normalised=True,
        attention_sinks=True,
    )  # fmt: skip
    if found.experts is None:
        raise WeightsError(f"{origin} lacks the key gpt-oss.expert_count.")
    experts = dataclasses.replace(found.experts, biased=True, limit=_LIMIT)
    rope = dataclasses.replace(found.rope, truncate=False) if found.rope.kind == "yarn" else found.rope
    return dataclasses.replace(found, experts=experts, rope=rope)


_LAYOUT = dataclasses.replace(
    LLAMA_LAYOUT,
    experts=ExpertNames(router="mlp.router", gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj"),
)
_GGUF = dataclasses.replace(GGUF, norms=dict(GGUF_NORMS) | {"post_attention_norm": "post_attention_norm"})


def _weights(config: ModelConfig, gguf: bool) -> Iterable[Weight]:
    return weights_of(config, _GGUF if gguf else _LAYOUT)


GPT_OSS = Family(_from_hf, _from_gguf, _weights)
