"""The hidden states of a model whose heads mix full attention with attention to sinks and recent tokens, by gates.

For training the gates (DuoAttention, arXiv 2410.10819, section 2.2): differentiable, of whole short texts, with T x T
numbers a head. On a mesh it is compiled for the weights as they are placed; XLA divides the work.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.model.alibi import slopes
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.rope import Angles, angles_of_layers, apply_rope
from pallas_kernels.softmax import NEG, capped

#: Texts beyond so many tokens have a layer computed again in the backward pass, in place of storing what it computed.
_STORED = 512


def hidden_states(
    params: Decoder,
    tokens: Int[Array, "B T"],
    gates: Float[Array, "L H"] | None = None,
    *,
    sink: int = 0,
    recent: int = 0,
) -> Float[Array, "B T M"]:
    """Hidden states after the last norm.

    Args:
      params: the model. tokens: of whole texts, without padding.
      gates: of each KV head of each global layer: ``gate * full + (1 - gate) * streaming`` is what its queries get;
        None for full attention.
      sink, recent: first and last tokens, its own among them, that a query sees of streaming attention.
    """
    place = jnp.arange(tokens.shape[1])
    positions = jnp.broadcast_to(place, tokens.shape)
    count = jnp.full(tokens.shape[:1], tokens.shape[1])
    angles = angles_of_layers([layer.config for layer in params.layers], positions, count)
    back = place[:, None] - place
    streaming = (back >= 0) & ((place < sink) | (back < recent))
    read = _layer if tokens.shape[1] <= _STORED else jax.checkpoint(_layer, static_argnums=())
    x, number = params.embed(tokens), 0
    for layer, rope in zip(params.layers, angles, strict=True):
        gate = None
        if gates is not None and layer.config.window is None:
            gate, number = gates[number], number + 1
        x = read(layer, x, rope, gate, streaming)
    return params.norm(x)


def _layer(
    layer: DecoderLayer,
    x: Float[Array, "B T M"],
    rope: Angles,
    gate: Float[Array, " H"] | None,
    streaming: Bool[Array, "T T"],
) -> Float[Array, "B T M"]:
    c, place = layer.config, jnp.arange(x.shape[1])
    q, k, v = layer.project(x)
    q, k, v = (a.astype(jnp.float32) for a in (apply_rope(q, rope), apply_rope(k, rope), v))
    logits = capped(jnp.einsum("bqhgd,bkhd->bhgqk", q, k) * c.attention_scale, c.attention_soft_cap)
    back = place[:, None] - place
    if c.positional == "alibi":
        logits = logits - jnp.asarray(slopes(c))[:, :, None, None] * back
    seen = back >= 0 if c.window is None else (back >= 0) & (back < c.window)
    attend = functools.partial(_attended, logits, v, layer.sink_logits)
    out = attend(seen)
    if gate is not None:
        full = gate[:, None, None]
        out = full * out + (1 - full) * attend(streaming)
    return layer.finish(x, out.astype(x.dtype))


def _attended(
    logits: Float[Array, "B H G T T"],
    v: Float[Array, "B T H D"],
    sink_logits: Float[Array, "H G"] | None,
    seen: Bool[Array, "T T"],
) -> Float[Array, "B T H G D"]:
    """Attention of queries to the keys that they see."""
    logits = jnp.where(seen, logits, NEG)
    if sink_logits is None:
        weight = jax.nn.softmax(logits, axis=-1)
    else:
        beside = jnp.broadcast_to(sink_logits[:, :, None, None], (*logits.shape[:-1], 1))
        weight = jax.nn.softmax(jnp.concatenate([logits, beside], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bhgqk,bkhd->bqhgd", weight, v)
