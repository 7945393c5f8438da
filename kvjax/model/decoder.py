"""The one decoder of every family: parameters and the parts of a layer as flax.nnx modules, used as plain pytrees.

The runtime owns the order of things (prefill in blocks, decode against a compressed cache), so a layer offers its
two halves around attention and never sees a cache. Projections that share an input are one matrix: at batch 1 to 8
a CPU step is bound by the number and the bytes of products, and grouping by KV head keeps every axis shardable.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.config import ModelConfig


def _param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: DTypeLike) -> nnx.Param:
    """A weight with its logical axes; random values serve tests and ``load`` overwrites them."""
    fan_in = shape[0] if len(shape) > 1 else 1
    values = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(values.astype(dtype), axes=axes)


def _product(x: Float[Array, "*S K"], weight: Float[Array, "K N"]) -> Float[Array, "*S N"]:
    """``x @ weight``, for a handful of rows by way of x's transpose.

    XLA's CPU compiler gives a plain product to a library whose kernel reads weights at 26 GB/s for 8 rows (2 cores);
    the form that contracts both leading axes goes to Eigen's, at 30. One row, many rows and other platforms have
    nothing to gain, and lose nothing by the transpose of a few kilobytes.
    """
    rows = x.reshape(-1, x.shape[-1])
    if not 3 <= rows.shape[0] <= 32:
        return x @ weight
    # The barrier keeps the compiler from folding the transpose back into a plain product.
    turned = jax.lax.optimization_barrier(rows.T)
    return jax.lax.dot_general(turned, weight, (((0,), (0,)), ((), ()))).reshape(*x.shape[:-1], -1)


class RMSNorm(nnx.Module):
    """Root-mean-square norm in float32 over the last axis, multiplied by a learned weight."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones((size,), dtype), axes=(None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*S M"]) -> Float[Array, "*S M"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (self.weight[...] * wide.astype(x.dtype)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm in float32 over the last axis: mean removed, unit variance, then a learned weight and bias."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones((size,), dtype), axes=(None,))
        self.bias = nnx.Param(jnp.zeros((size,), dtype), axes=(None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*S M"]) -> Float[Array, "*S M"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (self.weight[...] * wide + self.bias[...]).astype(x.dtype)


def _norm(config: ModelConfig, dtype: DTypeLike) -> RMSNorm | LayerNorm:
    kind = RMSNorm if config.norm == "rms" else LayerNorm
    return kind(config.hidden_size, config.rms_norm_eps, dtype=dtype)


class DecoderLayer(nnx.Module):
    """One pre-norm layer: grouped-query attention projections and an MLP, gated by SiLU or through GELU.

    Parameters (M hidden, H KV heads, G group size, D head_dim, F intermediate):
      qkv [M, H, G + 2, D]: the G queries of KV head h, then its key, then its value.
      out [H, G, D, M]; gate_up [M, 2, F], or up [M, F] without a gate; down [F, M].
      Optional biases have the same names and shapes without the leading input axis: qkv_bias [H, G + 2, D],
      out_bias [M], gate_up_bias [2, F] or up_bias [F], down_bias [M].
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        hidden, heads, group, dim = config.hidden_size, config.num_kv_heads, config.group_size, config.head_dim
        inner = config.intermediate_size
        self.input_norm = _norm(config, dtype)
        self.post_attention_norm = _norm(config, dtype)
        self.qkv = _param(rngs, (hidden, heads, group + 2, dim), (None, "kv_heads", None, None), dtype)
        self.out = _param(rngs, (heads, group, dim, hidden), ("kv_heads", None, None, None), dtype)
        if config.mlp == "gated_silu":
            self.gate_up = _param(rngs, (hidden, 2, inner), (None, None, "mlp"), dtype)
        else:
            self.up = _param(rngs, (hidden, inner), (None, "mlp"), dtype)
        self.down = _param(rngs, (inner, hidden), ("mlp", None), dtype)
        if config.qkv_bias:
            self.qkv_bias = _param(rngs, (heads, group + 2, dim), ("kv_heads", None, None), dtype)
        if config.output_bias:
            self.out_bias = _param(rngs, (hidden,), (None,), dtype)
        if config.mlp_bias:
            if config.mlp == "gated_silu":
                self.gate_up_bias = _param(rngs, (2, inner), (None, "mlp"), dtype)
            else:
                self.up_bias = _param(rngs, (inner,), ("mlp",), dtype)
            self.down_bias = _param(rngs, (hidden,), (None,), dtype)
        self.config = config

    def project(self, x: Float[Array, "*S M"]) -> tuple[Float[Array, "*S H G D"], Array, Array]:
        """Norm and project to (queries [..., H, G, D], keys [..., H, D], values [..., H, D]), before rotary."""
        c = self.config
        weight = self.qkv[...]
        flat = _product(self.input_norm(x), weight.reshape(c.hidden_size, -1))
        qkv = flat.reshape(*x.shape[:-1], *weight.shape[1:])
        if c.qkv_bias:
            qkv = qkv + self.qkv_bias[...]
        return qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]

    def finish(self, x: Float[Array, "*S M"], attended: Float[Array, "*S H G D"]) -> Float[Array, "*S M"]:
        """Output projection, residual, and the MLP with its residual."""
        c = self.config
        y = _product(attended.reshape(*x.shape[:-1], -1), self.out[...].reshape(-1, c.hidden_size))
        if c.output_bias:
            y = y + self.out_bias[...]
        x = x + y
        y = _product(self._activated(self.post_attention_norm(x)), self.down[...])
        return x + (y + self.down_bias[...] if c.mlp_bias else y)

    def _activated(self, x: Float[Array, "*S M"]) -> Float[Array, "*S F"]:
        """The MLP up to its activation."""
        c = self.config
        if c.mlp == "gelu":
            up = _product(x, self.up[...])
            return jax.nn.gelu(up + self.up_bias[...] if c.mlp_bias else up, approximate=True)
        inner = _product(x, self.gate_up[...].reshape(c.hidden_size, -1))
        if c.mlp_bias:
            inner = inner + self.gate_up_bias[...].reshape(-1)
        gate, up = jnp.split(inner, 2, axis=-1)
        return jax.nn.silu(gate) * up


class Decoder(nnx.Module):
    """Token embedding (with a norm of its own in some families), layers, final norm and output head.

    ``embedding`` is [V, M] and ``head`` is [M, V]. A model that ties them holds the head alone: every decode step reads
    it whole, at 29 GB/s against 23 for the other layout (8 rows, 2 CPU cores), while embedding a token touches one
    column of it (25 ms for a prompt of 2,048 tokens, of 2 seconds).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        if not config.tie_embeddings:
            self.embedding = _param(rngs, (config.vocab_size, config.hidden_size), ("vocab", None), dtype)
        if config.embedding_norm:
            self.embedding_norm = _norm(config, dtype)
        self.layers = nnx.List([DecoderLayer(config, rngs=rngs, dtype=dtype) for _ in range(config.num_layers)])
        self.norm = _norm(config, dtype)
        self.head = _param(rngs, (config.hidden_size, config.vocab_size), (None, "vocab"), dtype)
        self.config = config

    def embed(self, tokens: Int[Array, "*S"]) -> Float[Array, "*S M"]:
        """What the first layer reads of the tokens; ids are checked by the caller."""
        if self.config.tie_embeddings:
            x = jnp.moveaxis(self.head[...][:, tokens], 0, -1)
        else:
            x = self.embedding[...][tokens]
        return self.embedding_norm(x) if self.config.embedding_norm else x

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the parameters, and of the cache."""
        return jnp.dtype(self.head[...].dtype)

    def logits(self, x: Float[Array, "*S M"]) -> Float[Array, "*S V"]:
        """Float32 scores of every token, from the last layer's output."""
        return jnp.matmul(self.norm(x), self.head[...], preferred_element_type=jnp.float32)


def random_decoder(config: ModelConfig, seed: int = 0, dtype: DTypeLike = jnp.float32) -> Decoder:
    """A decoder with random weights, for tests and for benchmarks of shapes without weights."""
    return Decoder(config, rngs=nnx.Rngs(params=seed), dtype=dtype)


def abstract_decoder(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Decoder:
    """The same tree with ``jax.ShapeDtypeStruct`` leaves: what a loader must fill, without allocating anything."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0), dtype=dtype))
