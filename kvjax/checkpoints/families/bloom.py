"""BLOOM's layout: ALiBi, layer norms, a plain GELU MLP, biases everywhere, tied embeddings that go through a norm.

BLOOM: Le Scao et al., arXiv 2211.05100, section 3.2; its files as transformers and llama.cpp write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvjax.checkpoints.families.family import Family, Place, Weight, input_last, output_first, transposed, unchanged
from kvjax.checkpoints.families.settings import gguf_keys, refuse_quantised, size, whole
from kvjax.errors import WeightsError, quoted
from kvjax.model.config import ModelConfig


def _config(
    *,
    origin: str,
    vocabulary: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    context: int,
    epsilon: float,
    tied: bool,
) -> ModelConfig:
    if hidden % heads:
        raise WeightsError(f"{origin} asks for {heads} heads in {hidden} channels, which do not divide evenly.")
    return ModelConfig(
        family="bloom",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position=context,
        rms_norm_eps=epsilon,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_embeddings=tied,
        positional="alibi",
        norm="layer",
        mlp="gelu",
        embedding_norm=True,
    )


def _from_hf(config: Mapping[str, Any], origin: str) -> ModelConfig:
    """transformers' BloomConfig with its defaults; sizes have an old and a new name."""
    if config.get("apply_residual_connection_post_layernorm"):
        raise WeightsError(
            f"{origin} adds residuals after their norm (apply_residual_connection_post_layernorm), "
            "which is not supported."
        )
    refuse_quantised(config, origin)
    hidden = size(config, origin, "hidden_size", "n_embed")
    inner = config.get("n_inner") or 4 * hidden
    if inner != 4 * hidden:
        raise WeightsError(
            f"{origin} has {quoted(inner)} as its n_inner; a bloom's is {4 * hidden}, 4 times hidden_size."
        )
    return _config(
        origin=origin,
        vocabulary=size(config, origin, "vocab_size"),
        hidden=hidden,
        inner=inner,
        layers=size(config, origin, "num_hidden_layers", "n_layer"),
        heads=size(config, origin, "num_attention_heads", "n_head"),
        # ALiBi reads past any length; this is what the model was trained on.
        context=whole(config.get("seq_length") or 2048, "seq_length", origin),
        epsilon=float(config.get("layer_norm_epsilon", 1e-5)),
        tied=bool(config.get("tie_word_embeddings", True)),
    )


def _from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Any], origin: str
) -> ModelConfig:
    """llama.cpp's keys; its converter writes the tied head a second time, and then it is a head of its own."""
    key = gguf_keys(metadata, "bloom", origin)
    heads = key("attention.head_count", count=True)
    if key("attention.head_count_kv", heads, count=True) != heads:
        raise WeightsError(f"{origin} shares keys among heads, which a bloom model does not.")
    return _config(
        origin=origin,
        vocabulary=key("vocab_size", shapes.get("token_embd.weight", (0,))[0] or None, count=True),
        hidden=key("embedding_length", count=True),
        inner=key("feed_forward_length", count=True),
        layers=key("block_count", count=True),
        heads=heads,
        context=key("context_length", count=True),
        epsilon=float(key("attention.layer_norm_epsilon")),
        tied="output.weight" not in shapes,
    )


def _fused(gguf: bool) -> Place:
    """Queries, keys and values in one tensor: of head after head [H, 3, D], or in a GGUF one after the other [3, H, D].

    The parameter is [H, 3, D], since a head has one query of its own.
    """
    return (lambda values: values.swapaxes(-3, -2)) if gguf else unchanged


def _layer(config: ModelConfig, index: int, gguf: bool) -> Iterator[Weight]:
    hidden, inner, fused = config.hidden_size, config.intermediate_size, _fused(gguf)
    parts: tuple[tuple[str, str, str, int, int, Place, Place], ...] = (
        ("self_attention.query_key_value", "attn_qkv", "qkv", 3 * hidden, hidden, input_last(fused), fused),
        ("self_attention.dense", "attn_output", "out", hidden, hidden, output_first, unchanged),
        ("mlp.dense_h_to_4h", "ffn_up", "up", inner, hidden, transposed, unchanged),
        ("mlp.dense_4h_to_h", "ffn_down", "down", hidden, inner, transposed, unchanged),
    )
    hf, blk, param = f"transformer.h.{index}.", f"blk.{index}.", f"layers.{index}."
    for hf_name, gguf_name, target, rows, columns, matrix, bias in parts:
        names = hf + hf_name, blk + gguf_name, param + target
        yield Weight(names[0] + ".weight", names[1] + ".weight", (rows, columns), names[2], matrix)
        yield Weight(names[0] + ".bias", names[1] + ".bias", (rows,), names[2] + "_bias", bias)
    yield from _norm(config, hf + "input_layernorm", blk + "attn_norm", param + "input_norm")
    yield from _norm(config, hf + "post_attention_layernorm", blk + "ffn_norm", param + "post_attention_norm")


def _norm(config: ModelConfig, hf: str, gguf: str, param: str) -> Iterator[Weight]:
    for part in (".weight", ".bias"):
        yield Weight(hf + part, gguf + part, (config.hidden_size,), param + part, unchanged)


def _weights(config: ModelConfig, gguf: bool) -> Iterator[Weight]:
    vocabulary = (config.vocab_size, config.hidden_size)
    target, view = ("head", transposed) if config.tie_embeddings else ("embedding", unchanged)
    yield Weight("transformer.word_embeddings.weight", "token_embd.weight", vocabulary, target, view)
    yield from _norm(config, "transformer.word_embeddings_layernorm", "token_embd_norm", "embedding_norm")
    for index in range(config.num_layers):
        yield from _layer(config, index, gguf)
    yield from _norm(config, "transformer.ln_f", "output_norm", "norm")
    if not config.tie_embeddings:
        yield Weight("lm_head.weight", "output.weight", vocabulary, "head", transposed)


#: The published checkpoints were saved from the model without its head, whose names begin at "h.0".
BLOOM = Family(_from_hf, _from_gguf, _weights, optional_prefix="transformer.")
