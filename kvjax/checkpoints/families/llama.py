"""Llama's layout, also mistral's and qwen's: rotary embedding, RMS norms, a MLP gated by SiLU.

Files as transformers and llama.cpp write them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Weight
from kvjax.checkpoints.families.settings import (
    SILU,
    Keys,
    activation,
    checked_layers,
    checked_size,
    gguf_keys,
    layer_count,
    refuse_quantised,
    size,
)
from kvjax.checkpoints.families.sliding import Slides, every_layer, windows_from_gguf
from kvjax.checkpoints.families.weight_names import GGUF, LLAMA_LAYOUT, Pairs, weights_of
from kvjax.checkpoints.rope_settings import (
    context_from_hf,
    rope_from_gguf,
    rope_from_hf,
    rotary_dim_from_hf,
    scaled_context,
)
from kvjax.errors import WeightsError
from kvjax.model.config import MLPKind, ModelConfig
from kvjax.model.experts import Experts


def config_from_hf(
    config: Mapping[str, Any],
    origin: str,
    *,
    context: int,
    epsilon: tuple[str, float] = ("rms_norm_eps", 1e-6),
    activations: Mapping[str, MLPKind] = SILU,
    tied: bool = False,
    partial: float | None = None,
    **features: Any,
) -> ModelConfig:
    """The keys that every llama-like ``config.json`` has, with transformers' defaults for the absent ones.

    Args:
      config: the file's content.
      origin: the file, for messages.
      context: tokens of context where the file does not say.
      epsilon: the key of the norms' epsilon, and its default.
      activations: the MLP that each known ``hidden_act`` means, the default's first.
      tied: whether the head is the embedding where the file does not say.
      partial: the fraction of a head's channels with rotary embedding where the file does not say; None for families
        that apply it to whole heads, and whose files must not say otherwise.
      features: further fields of :class:`ModelConfig`, such as ``qkv_bias``.
    """
    mlp = activation(config, activations, origin)
    refuse_quantised(config, origin)
    hidden, heads = size(config, origin, "hidden_size"), size(config, origin, "num_attention_heads")

    def given(name: str, default: int) -> int:
        return default if config.get(name) is None else size(config, origin, name)

    head_dim = given("head_dim", hidden // heads)
    rotary = None if partial is None else rotary_dim_from_hf(config, head_dim, partial, origin)
    before, scaled = given("max_position_embeddings", context), context_from_hf(config, context)
    return ModelConfig(
        family=config["model_type"],
        vocab_size=size(config, origin, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=size(config, origin, "intermediate_size"),
        num_layers=layer_count(config, origin),
        num_heads=heads,
        num_kv_heads=given("num_key_value_heads", heads),
        head_dim=head_dim,
        max_position=checked_size(scaled, "context", origin),
        rope=rope_from_hf(config, before, rotary or head_dim, origin, partial=partial is not None),
        rotary_dim=None if rotary == head_dim else rotary,
        rms_norm_eps=float(config.get(epsilon[0], epsilon[1])),
        tie_embeddings=bool(config.get("tie_word_embeddings", tied)),
        mlp=mlp,
        **features,
    )


def config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, Any],
    origin: str,
    *,
    family: str | None = None,
    partial: bool = False,
    slides: Slides | None = None,
    idle: bool = False,
    normalised: bool | None = None,
    **features: Any,
) -> ModelConfig:
    """GGUF keys begin with the architecture's name; biases and tying show only in which tensors are there.

    Args:
      metadata, shapes, factors, origin: of the file, see :class:`Family`.
      family: its name where llama.cpp's is another.
      partial: whether its models may apply rotary embedding to only a part of each head.
      slides: which layers have the window that the file gives, if it gives one; None for families that have none.
      idle: whether windows that never slide are kept, for layers with a rotary embedding of their own.
      normalised: whether the weights of a token's experts sum to 1; None for families that have no experts.
      features: further fields of :class:`ModelConfig`; they win.
    """
    arch = metadata["general.architecture"]
    key = gguf_keys(metadata, arch, origin)
    hidden, heads = key("embedding_length", count=True), key("attention.head_count", count=True)
    before = key("context_length", count=True)
    head_dim = key("attention.key_length", hidden // heads, count=True)
    rotary = key("rope.dimension_count", head_dim, count=True)
    if (rotary != head_dim and not partial) or key("attention.value_length", head_dim) != head_dim:
        raise WeightsError(f"{origin} rotates only a part of each head or has narrower values, which is not supported.")
    layers = checked_layers(key("block_count", count=True), origin)
    rope = rope_from_gguf(metadata, arch, factors, before, rotary, origin)
    context = checked_size(scaled_context(rope, before), f"{arch}.context_length", origin)
    windows = windows_from_gguf(key, layers, context, slides or every_layer, idle)
    asks_experts = bool(key("expert_count", 0))
    if (windows and slides is None) or (asks_experts and normalised is None):
        raise WeightsError(f"{origin} asks for sliding-window attention or experts, which its family does not have.")
    experts = _experts(key, shapes, normalised) if asks_experts and normalised is not None else None
    inner = key("feed_forward_length", experts.inner if experts else None, count=True)
    embedding = shapes.get("token_embd.weight", (0,))
    epsilon = "layer_norm_epsilon" if features.get("norm") == "layer" else "layer_norm_rms_epsilon"
    found: dict[str, Any] = {
        "qkv_bias": "blk.0.attn_q.bias" in shapes or "blk.0.attn_qkv.bias" in shapes,
        "output_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "tie_embeddings": "output.weight" not in shapes,
        "rotary_dim": None if rotary == head_dim else rotary,
        "windows": windows,
        "experts": experts,
    }
    return ModelConfig(
        family=family or arch,
        vocab_size=key("vocab_size", embedding[0] or None, count=True),
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=key("attention.head_count_kv", heads, count=True),
        head_dim=head_dim,
        max_position=context,
        rope=rope,
        rms_norm_eps=float(key(f"attention.{epsilon}")),
        **(found | features),
    )


def _experts(key: Keys, shapes: Mapping[str, tuple[int, ...]], normalised: bool) -> Experts:
    """The experts of a GGUF, all layers of which have them."""
    shared = shapes.get("blk.0.ffn_gate_shexp.weight", (0,))[0]
    # Older files do not say it, and their feed_forward_length is another number.
    stacked, first = (shapes.get(f"blk.0.ffn_gate{one}.weight", ()) for one in ("_exps", ".0"))
    held = stacked[1] if len(stacked) == 3 else first[0] if len(first) == 2 else None
    inner = key("expert_feed_forward_length", held or None, count=True)
    return Experts(key("expert_count", count=True), key("expert_used_count", count=True), inner, normalised, shared)


def decoder_weights(config: ModelConfig, gguf: bool, permuted: bool = False) -> Iterable[Weight]:
    """Every weight of the layout; ``permuted`` says that a GGUF has llama's own order of rotary channels."""
    pairs: Pairs = "neighbours" if permuted else "halves"
    return weights_of(config, dataclasses.replace(GGUF, pairs=pairs) if gguf else LLAMA_LAYOUT)


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    bias, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return config_from_hf(config, origin, context=2048, qkv_bias=bias, output_bias=bias, mlp_bias=mlp)


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    """A llama, or a mixtral, which has experts."""
    found = config_from_gguf(metadata, shapes, factors, origin, normalised=True)
    return dataclasses.replace(found, family="mixtral") if found.experts else found


LLAMA = Family(_from_hf, _from_gguf, functools.partial(decoder_weights, permuted=True))
