"""Families of models: how a configuration becomes a ``ModelConfig`` and which weight fills which part of a parameter.

A family is one entry of ``FAMILIES``: a mapping of a Hugging Face ``config.json``, a mapping of GGUF metadata, and a
weight map that names every tensor of a checkpoint with the rectangle of the parameter it fills. Adding a family is
adding an entry; the loaders know none by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvjax.checkpoints.bloom import BLOOM
from kvjax.checkpoints.rope_config import rope_from_gguf, rope_from_hf
from kvjax.checkpoints.weight_map import Family, Place, Weight, input_last, output_first, turned, whole
from kvjax.errors import WeightsError
from kvjax.model.config import ModelConfig


def family(name: Any, origin: str) -> Family:
    """The family called ``name``; WeightsError names the known ones when it is not there."""
    if not isinstance(name, str) or name not in FAMILIES:
        close = difflib.get_close_matches(str(name), FAMILIES, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise WeightsError(
            f"{origin} is a model of architecture {name!r}{hint}; supported are {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[name]


def _hf_config(
    config: Mapping[str, Any], origin: str, *, qkv_bias: bool, output_bias: bool, mlp_bias: bool, context: int
) -> ModelConfig:
    """The keys every llama-like configuration shares, with transformers' defaults for the absent ones."""
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise WeightsError(f"{origin} has {config.get(name)!r} as its {name}; a whole number is needed.")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise WeightsError(f"{origin} asks for the activation {config['hidden_act']!r}; only silu is supported.")
    if config.get("quantization_config"):
        raise WeightsError(f"{origin} describes quantised weights (quantization_config), which cannot be read.")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    max_position = int(config.get("max_position_embeddings") or context)
    return ModelConfig(
        family=config["model_type"],
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position=max_position,
        rope=rope_from_hf(config, max_position, head_dim, origin),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _llama_from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    bias, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return _hf_config(config, origin, qkv_bias=bias, output_bias=bias, mlp_bias=mlp, context=2048)


def _mistral_from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    # transformers' MistralConfig slides a window of 4096 tokens unless the file says null.
    if config.get("sliding_window", 4096) is not None:
        raise WeightsError(f"{origin} asks for sliding-window attention (sliding_window), which is not supported.")
    return _hf_config(config, origin, qkv_bias=False, output_bias=False, mlp_bias=False, context=131072)


def _qwen2_from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    sliding = "sliding_attention" in (config.get("layer_types") or ())
    if config.get("use_sliding_window") or sliding:
        raise WeightsError(f"{origin} asks for sliding-window attention (use_sliding_window), which is not supported.")
    return _hf_config(config, origin, qkv_bias=True, output_bias=False, mlp_bias=False, context=32768)


def _config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    """GGUF keys begin with the architecture's name; biases and tying show only in which tensors are there."""
    arch = metadata["general.architecture"]

    def key(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{name}", default)
        if value is None:
            raise WeightsError(f"{origin} lacks the key {arch}.{name!s}.")
        if isinstance(value, list):
            raise WeightsError(f"{origin} gives every layer its own {arch}.{name!s}, which is not supported.")
        return value

    hidden, heads, context = key("embedding_length"), key("attention.head_count"), key("context_length")
    head_dim = key("attention.key_length", hidden // heads)
    if key("rope.dimension_count", head_dim) != head_dim or key("attention.value_length", head_dim) != head_dim:
        raise WeightsError(f"{origin} rotates only a part of each head or has narrower values, which is not supported.")
    if key("attention.sliding_window", 0) or key("expert_count", 0):
        raise WeightsError(f"{origin} asks for sliding-window attention or experts, which are not supported.")
    embedding = shapes.get("token_embd.weight", (0,))
    return ModelConfig(
        family=arch,
        vocab_size=key("vocab_size", embedding[0] or None),
        hidden_size=hidden,
        intermediate_size=key("feed_forward_length"),
        num_layers=key("block_count"),
        num_heads=heads,
        num_kv_heads=key("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=context,
        rope=rope_from_gguf(metadata, arch, factors, context, head_dim, origin),
        rms_norm_eps=float(key("attention.layer_norm_rms_epsilon")),
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        tie_embeddings="output.weight" not in shapes,
    )


def _channels(values: np.ndarray, permuted: bool) -> np.ndarray:
    """A view of [..., D] whose last axes run through the channels in the checkpoint's order.

    GGUF's llama converter stores channel i + D/2 right after channel i: [2, D/2] transposed. Splitting one axis is
    always a view, so the order is undone by where a value is written, without a copy.
    """
    if not permuted:
        return values
    return values.reshape(*values.shape[:-1], 2, values.shape[-1] // 2).swapaxes(-1, -2)


def _layer(config: ModelConfig, index: int, gguf: bool) -> Iterator[Weight]:
    hidden, inner, group = config.hidden_size, config.intermediate_size, config.group_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    permuted = gguf and config.family == "llama"
    hf, blk, param = f"model.layers.{index}.", f"blk.{index}.", f"layers.{index}."

    def weight(hf_name: str, gguf_name: str, shape: tuple[int, ...], target: str, place: Place) -> Weight:
        return Weight(hf + hf_name, blk + gguf_name, shape, param + target, place)

    projections: tuple[tuple[str, int, Place], ...] = (
        ("q", heads, lambda values: _channels(values[..., :group, :], permuted)),
        ("k", kv_heads, lambda values: _channels(values[..., group, :], permuted)),
        ("v", kv_heads, lambda values: values[..., group + 1, :]),
    )
    for name, rows, place in projections:
        hf_name, gguf_name = f"self_attn.{name}_proj.", f"attn_{name}."
        yield weight(hf_name + "weight", gguf_name + "weight", (rows, hidden), "qkv", input_last(place))
        if config.qkv_bias:
            yield weight(hf_name + "bias", gguf_name + "bias", (rows,), "qkv_bias", place)
    for part, name in enumerate(("gate", "up")):
        half: Place = lambda values, part=part: values[..., part, :]  # noqa: E731
        hf_name, gguf_name = f"mlp.{name}_proj.", f"ffn_{name}."
        yield weight(hf_name + "weight", gguf_name + "weight", (inner, hidden), "gate_up", input_last(half))
        if config.mlp_bias:
            yield weight(hf_name + "bias", gguf_name + "bias", (inner,), "gate_up_bias", half)
    closing = (
        ("self_attn.o_proj.", "attn_output.", heads, "out", config.output_bias),
        ("mlp.down_proj.", "ffn_down.", inner, "down", config.mlp_bias),
    )
    for hf_name, gguf_name, columns, target, bias in closing:
        yield weight(hf_name + "weight", gguf_name + "weight", (hidden, columns), target, output_first)
        if bias:
            yield weight(hf_name + "bias", gguf_name + "bias", (hidden,), target + "_bias", whole)
    norms = (
        ("input_layernorm", "attn_norm", "input_norm"),
        ("post_attention_layernorm", "ffn_norm", "post_attention_norm"),
    )
    for hf_name, gguf_name, target in norms:
        yield weight(hf_name + ".weight", gguf_name + ".weight", (hidden,), target + ".weight", whole)


def _weights(config: ModelConfig, gguf: bool) -> Iterator[Weight]:
    vocabulary = (config.vocab_size, config.hidden_size)
    # A tied table is stored once, as the head.
    target, view = ("head", turned) if config.tie_embeddings else ("embedding", whole)
    yield Weight("model.embed_tokens.weight", "token_embd.weight", vocabulary, target, view)
    for index in range(config.num_layers):
        yield from _layer(config, index, gguf)
    yield Weight("model.norm.weight", "output_norm.weight", (config.hidden_size,), "norm.weight", whole)
    if not config.tie_embeddings:
        yield Weight("lm_head.weight", "output.weight", vocabulary, "head", turned)


FAMILIES: dict[str, Family] = {
    "bloom": BLOOM,
    "llama": Family(_llama_from_hf, _config_from_gguf, _weights),
    "mistral": Family(_mistral_from_hf, None, _weights),
    "qwen2": Family(_qwen2_from_hf, _config_from_gguf, _weights),
}
