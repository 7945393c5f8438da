"""The one decoder of every family: parameters and the parts of a layer as flax.nnx modules, used as plain pytrees.

The runtime owns the order of things (prefill in blocks, decode against a compressed cache), so a layer offers its
two halves around attention and never sees a cache. Projections of the same input are one matrix: at batch 1 to 8
a CPU step is bound by the number and the bytes of products, and grouping by KV head keeps every axis shardable.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.model.config import ModelConfig, NormKind
from kvjax.model.exchange import ONE_DEVICE, Exchange
from kvjax.model.experts import ExpertMLP
from kvjax.model.matmul import matmul, matmul_nt
from kvjax.model.params import gate_columns, new_param
from kvjax.model.quantised import Quantised, dequantised
from pallas_kernels.softmax import capped

#: The least epsilon of a norm: padding of prompts is zeros, and 0 divided by its root must be 0, not no number.
_LEAST_EPSILON = float(jnp.finfo(jnp.float32).tiny)


def _unit(x: Float[Array, "*S M"], kind: NormKind, eps: float) -> Float[Array, "*S M"]:
    """Float32 numbers whose mean square is 1, for a layer norm without their mean."""
    wide = x.astype(jnp.float32)
    if kind == "layer":
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + max(eps, _LEAST_EPSILON))


class RMSNorm(nnx.Module):
    """Root-mean-square norm in float32 over the last axis, multiplied by a learned weight, or by 1 + that."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike, offset: bool = False):
        self.weight = nnx.Param(jnp.zeros((size,), dtype) if offset else jnp.ones((size,), dtype), axes=(None,))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*S M"]) -> Float[Array, "*S M"]:
        wide = _unit(x, "rms", self.eps)
        if self.offset:  # in float32: bfloat16 has no number between 1 and 1.008
            return ((1 + self.weight[...].astype(jnp.float32)) * wide).astype(x.dtype)
        return (self.weight[...] * wide.astype(x.dtype)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm in float32 over the last axis: mean removed, unit variance, a learned weight, and maybe a bias."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike, biased: bool = True):
        self.weight = nnx.Param(jnp.ones((size,), dtype), axes=(None,))
        if biased:
            self.bias = nnx.Param(jnp.zeros((size,), dtype), axes=(None,))
        self.eps, self.biased = eps, biased

    def __call__(self, x: Float[Array, "*S M"]) -> Float[Array, "*S M"]:
        wide = self.weight[...] * _unit(x, "layer", self.eps)
        return (wide + self.bias[...] if self.biased else wide).astype(x.dtype)


def _norm(config: ModelConfig, dtype: DTypeLike, size: int | None = None) -> RMSNorm | LayerNorm:
    """A norm of the model's kind, over the hidden states unless a size is given."""
    size = size or config.hidden_size
    if config.norm == "rms":
        return RMSNorm(size, config.rms_norm_eps, dtype=dtype, offset=config.norm_offset)
    return LayerNorm(size, config.rms_norm_eps, dtype=dtype, biased=config.norm_bias)


_GATES = {"gated_silu": jax.nn.silu, "gated_gelu": functools.partial(jax.nn.gelu, approximate=True)}


class DecoderLayer(nnx.Module):
    """One layer: grouped-query attention projections and an MLP, with the features that the configuration names.

    Parameters, matrices [in, out] (gate_up, up, and all that are quantised, are stored [out, in]) whose logical axes
    are (M hidden, H KV heads, G group size, D head_dim, F intermediate):
      qkv [M | H, G + 2, D]: the G queries of KV head h, then its key, then its value.
      out [H, G, D | M]; gate_up [M | F / C, 2, C]: C columns of the gate, then as many of what it gates, so that a
      shard of the columns holds both halves; or up [M | F] without a gate; down [F | M].
      Where there are experts (:class:`kvjax.model.experts.ExpertMLP`), the last are those of all tokens, if any.
      Optional biases have the same names and logical axes without the input's: qkv_bias [H, G + 2, D], out_bias [M],
      gate_up_bias [F / C, 2, C] or up_bias [F], down_bias [M].
      Norms, as far as the configuration has them: input_norm and post_attention_norm of what attention and the MLP
      read, attention_output_norm and mlp_output_norm of what they give [M]; q_norm and k_norm of each head [D], or
      qk_norm [H, G + 2, D] across heads, with the axes of qkv_bias, or by head (what values have of it is not used).
      sinks [H, G], where softmaxes have a logit of their own.

    On a mesh ``config`` has the heads of one device, the parameters are its parts of them, and ``exchange`` is what the
    devices exchange (:func:`with_exchange`).
    """

    exchange: Exchange = ONE_DEVICE

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None, dtype: DTypeLike):
        hidden, heads, group, dim = config.hidden_size, config.num_kv_heads, config.group_size, config.head_dim
        if config.norm_order != "post":
            self.input_norm = _norm(config, dtype)
            if not config.shared_norm:
                self.post_attention_norm = _norm(config, dtype)
        if config.norm_order != "pre":
            self.attention_output_norm, self.mlp_output_norm = (_norm(config, dtype) for _ in range(2))
        self.qkv = new_param(
            rngs,
            (hidden, heads, group + 2, dim),
            (None, "kv_heads", None, None),
            dtype,
            fine=True,
            weights=config.weights_of("qkv"),
        )
        weights = config.weights_of("out")
        self.out = new_param(
            rngs, (heads, group, dim, hidden), ("kv_heads", None, None, None), dtype, 3, weights=weights
        )
        if config.experts is not None:
            self.experts = ExpertMLP(config, config.experts, rngs=rngs, dtype=dtype)
        if config.dense_mlp:
            self._init_mlp(config, rngs, dtype)
        if config.qk_norm:
            self.q_norm, self.k_norm = (_norm(config, dtype, dim) for _ in range(2))
        if config.qk_norm_across_heads or config.qk_norm_by_head:
            # By head it is needed where the head is attended for, which its columns may not be.
            axes = ("kv_heads" if config.qk_norm_across_heads else None, None, None)
            self.qk_norm = new_param(rngs, (heads, group + 2, dim), axes, dtype, 0)
        if config.attention_sinks:
            self.sinks = new_param(rngs, (heads, group), (None, None), dtype, 0)
        if config.qkv_bias:
            self.qkv_bias = new_param(rngs, (heads, group + 2, dim), ("kv_heads", None, None), dtype, 0)
        if config.output_bias:
            self.out_bias = new_param(rngs, (hidden,), (None,), dtype, 0)
        self.config = config

    def _init_mlp(self, config: ModelConfig, rngs: nnx.Rngs | None, dtype: DTypeLike) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        if config.gated:
            half = gate_columns(inner)
            shape, axes = (hidden, inner // half, 2, half), (None, "mlp", None, None)
            weights = config.weights_of("gate_up")
            self.gate_up = new_param(rngs, shape, axes, dtype, transposed=True, weights=weights)
        else:
            weights = config.weights_of("up")
            self.up = new_param(rngs, (hidden, inner), (None, "mlp"), dtype, transposed=True, weights=weights)
        self.down = new_param(rngs, (inner, hidden), ("mlp", None), dtype, weights=config.weights_of("down"))
        if config.mlp_bias:
            if config.gated:
                self.gate_up_bias = new_param(rngs, shape[1:], axes[1:], dtype, 0)
            else:
                self.up_bias = new_param(rngs, (inner,), ("mlp",), dtype, 0)
            self.down_bias = new_param(rngs, (hidden,), (None,), dtype, 0)

    def attention_input(self, x: Float[Array, "*S M"]) -> Float[Array, "*S M"]:
        """The input of attention's projections: the layer's input after its norm, where it has one there."""
        return x if self.config.norm_order == "post" else self.input_norm(x)

    def project(self, x: Float[Array, "*S M"]) -> tuple[Float[Array, "*S H G D"], Array, Array]:
        """Norm and project to (queries [..., H, G, D], keys [..., H, D], values [..., H, D]), before rotary."""
        c = self.config
        flat = matmul(self.attention_input(x), self.qkv[...])
        if c.qkv_bias:
            flat = flat + self.qkv_bias[...]
        if c.qk_norm_across_heads:
            flat = self._normed_across_heads(flat)
        qkv = self.exchange.heads(flat).reshape(*x.shape[:-1], c.num_kv_heads, c.group_size + 2, c.head_dim)
        if c.qk_norm_by_head:
            qkv = jnp.concatenate([self._normed_by_head(qkv), qkv[..., -1:, :]], axis=-2)
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        return (self.q_norm(q), self.k_norm(k), v) if c.qk_norm else (q, k, v)

    def _normed_by_head(self, qkv: Float[Array, "*S H N D"]) -> Float[Array, "*S H K D"]:
        """Queries and keys, each head's through its own norm."""
        every = self.qk_norm[...].reshape(-1, qkv.shape[-2] * qkv.shape[-1])
        weight = self.exchange.own_heads(every).reshape(qkv.shape[-3:])[:, :-1]
        return (weight * _unit(qkv[..., :-1, :], self.config.norm, self.config.rms_norm_eps)).astype(qkv.dtype)

    def _normed_across_heads(self, flat: Float[Array, "*S N"]) -> Float[Array, "*S N"]:
        """The projection's columns, of which all queries together, and all keys, have a mean square of 1."""
        c, exchange = self.config, self.exchange
        column = exchange.first_column(flat.shape[-1]) + jnp.arange(flat.shape[-1])
        kind = column // c.head_dim % (c.group_size + 2)
        parts = [kind < c.group_size, kind == c.group_size]
        wide = flat.astype(jnp.float32)
        squares = [(jnp.where(part, wide, 0) ** 2).sum(-1, keepdims=True) for part in parts]
        counts = [part.sum(dtype=jnp.float32) for part in parts]
        total = exchange.sum_columns([*squares, *counts])
        least = max(c.rms_norm_eps, _LEAST_EPSILON)
        queries, keys = (jax.lax.rsqrt(total[i] / total[i + 2] + least) for i in range(2))
        normed = self.qk_norm[...] * (wide * jnp.where(parts[0], queries, keys))
        return jnp.where(parts[0] | parts[1], normed.astype(flat.dtype), flat)

    @property
    def sink_logits(self) -> Float[Array, "H G"] | None:
        """The logit, float32, that each query head's softmax has beside its keys' (gpt-oss's learned bias in the
        denominator, arXiv 2508.10925, section 2.2); None where there is none.

        It is no key: no policy keeps or drops it, and what it takes of a softmax is attention to nothing.
        """
        if not self.config.attention_sinks:
            return None
        return self.exchange.own_heads(self.sinks[...].astype(jnp.float32).reshape(-1, self.config.group_size))

    def output_norms(self, v: Float[Array, "B H T D"]) -> Float[Array, "B H G T"]:
        """The L1 norm of each value's product with the output projection of each query head that reads it, float32."""
        c, weight = self.config, dequantised(self.out[...])
        rows = self.exchange.output_rows(weight.T if isinstance(self.out[...], Quantised) else weight)
        own = self.exchange.own_heads(rows.reshape(-1, c.group_size * c.head_dim * c.hidden_size))
        own = own.reshape(c.num_kv_heads, c.group_size, c.head_dim, c.hidden_size)
        block = math.gcd(v.shape[2], 256)

        def head(given: tuple[Array, Array]) -> Array:
            def part(values: Float[Array, "B S D"]) -> Float[Array, "B G S"]:
                outputs = jnp.einsum("bsd,gdm->bgsm", values, given[1], preferred_element_type=jnp.float32)
                return jnp.abs(outputs).sum(axis=-1)

            values = given[0].reshape(v.shape[0], -1, block, c.head_dim)
            found = jax.lax.map(part, values.swapaxes(0, 1))
            return jnp.moveaxis(found, 0, 2).reshape(v.shape[0], c.group_size, -1)

        return jax.lax.map(head, (v.swapaxes(0, 1), own)).swapaxes(0, 1)

    def finish(self, x: Float[Array, "*S M"], attended: Float[Array, "*S H G D"]) -> Float[Array, "*S M"]:
        """Output projection, residual, and the MLP with its residual; both residuals at once in a parallel block."""
        c = self.config
        channels = self.exchange.attended(attended).reshape(*x.shape[:-1], -1)
        y = self.exchange.output(matmul(channels, self.out[...]))
        y = y + self.out_bias[...] if c.output_bias else y
        if c.parallel_block:
            return self._added(x, y + self._mlp(self.input_norm(x) if c.shared_norm else self.post_attention_norm(x)))
        x = self._added(x, y if c.norm_order == "pre" else self.attention_output_norm(y))
        y = self._mlp(x if c.norm_order == "post" else self.post_attention_norm(x))
        return self._added(x, y if c.norm_order == "pre" else self.mlp_output_norm(y))

    def _added(self, x: Float[Array, "*S M"], y: Float[Array, "*S M"]) -> Float[Array, "*S M"]:
        """The residual with what a part of the layer adds."""
        scale = self.config.residual_scale
        return x + (y if scale == 1 else y * jnp.asarray(scale, y.dtype))

    def _mlp(self, x: Float[Array, "*S M"]) -> Float[Array, "*S M"]:
        c = self.config
        if c.experts is None:
            y = matmul(self.activated(x), self.down[...])
        else:
            routed = self.experts.routed(x)
            y = self.experts(x, routed)
            if c.dense_mlp:
                y = y + self.experts.shared(x, matmul(self.activated(x), self.down[...]))
        y = self.exchange.mlp(y)
        if c.experts is not None and c.experts.biased:
            y = y + self.experts.bias(routed).reshape(y.shape).astype(y.dtype)
        return y + self.down_bias[...] if c.mlp_bias and c.dense_mlp else y

    def activated(self, x: Float[Array, "*S M"]) -> Float[Array, "*S F"]:
        """The MLP up to its activation, of the channels whose weights are there."""
        c = self.config
        if not c.gated:
            up = matmul_nt(x, self.up[...])
            return jax.nn.gelu(up + self.up_bias[...] if c.mlp_bias else up, approximate=c.mlp == "gelu")
        inner = matmul_nt(x, self.gate_up[...])
        if c.mlp_bias:
            inner = inner + self.gate_up_bias[...]
        halves = inner.reshape(*x.shape[:-1], -1, 2, gate_columns(c.intermediate_size))
        gated = _GATES[c.mlp](halves[..., 0, :]) * halves[..., 1, :]
        return gated.reshape(*x.shape[:-1], -1)


class Decoder(nnx.Module):
    """Token embedding (with a norm of its own in some families), layers, final norm and output head.

    ``embedding`` is [V, M], and ``head``, logically [M, V], is stored so too: a model that ties them holds the head
    alone, whose rows are what tokens are embedded as.
    """

    exchange: Exchange = ONE_DEVICE

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None, dtype: DTypeLike = jnp.float32):
        shape = config.vocab_size, config.hidden_size
        if not config.tie_embeddings:
            weights = config.weights_of("embedding")
            self.embedding = new_param(rngs, shape, ("vocab", None), dtype, looked_up=True, weights=weights)
        if config.embedding_norm:
            self.embedding_norm = _norm(config, dtype)
        self.layers = nnx.List(
            [DecoderLayer(config.layer(i), rngs=rngs, dtype=dtype) for i in range(config.num_layers)]
        )
        self.norm = _norm(config, dtype)
        self.head = new_param(
            rngs, shape[::-1], (None, "vocab"), dtype, transposed=True, fine=True, weights=config.weights_of("head")
        )
        if config.head_bias:
            self.head_bias = new_param(rngs, (config.vocab_size,), ("vocab",), dtype, 0)
        self.config = config

    def embed(self, tokens: Int[Array, "*S"]) -> Float[Array, "*S M"]:
        """The first layer's input, of these tokens; ids are checked by the caller."""
        x = self.exchange.embed(self.table, tokens)
        if self.config.embedding_scale != 1:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        return self.embedding_norm(x) if self.config.embedding_norm else x

    @property
    def table(self) -> Float[Array, "V M"] | Quantised:
        """The embedding: where it is tied, the head as it is stored."""
        return self.head[...] if self.config.tie_embeddings else self.embedding[...]

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the parameters that are floats, of activations, and of the cache."""
        return jnp.dtype(self.head[...].dtype)

    @property
    def stream(self) -> tuple[int, jnp.dtype]:
        """Channels and dtype of what passes from layer to layer."""
        return self.config.hidden_size, self.dtype

    @property
    def number_format(self) -> str:
        """The dtype, and how weights are stored where that is another, for reports: "float32, int8 weights"."""
        return str(self.dtype) if self.config.weights is None else f"{self.dtype}, {self.config.weights} weights"

    def logits(self, x: Float[Array, "*S M"]) -> Float[Array, "*S V"]:
        """Float32 scores of every token, from the last layer's output."""
        c = self.config
        own = matmul_nt(self.norm(x), self.head[...], jnp.float32)
        logits = self.exchange.logits(own + self.head_bias[...] if c.head_bias else own)
        if c.logit_scale != 1:
            logits = logits * c.logit_scale
        return capped(logits, c.logit_soft_cap)


_Part = TypeVar("_Part", Decoder, DecoderLayer)


def with_exchange(part: _Part, config: ModelConfig, exchange: Exchange) -> _Part:
    """A decoder or a layer, with the same parameters, as a device runs it that exchanges numbers with others.

    Args:
      part: the parameters that this device holds.
      config: the model with the heads that it holds.
      exchange: what the devices exchange.
    """
    view = copy.copy(part)
    view.config, view.exchange = config, exchange
    return view


def without_layers(params: Decoder) -> Decoder:
    """The embedding, the final norm and the head of a decoder, as one that has no layers."""
    ends = copy.copy(params)
    ends.layers = nnx.List([])
    return ends


def random_decoder(config: ModelConfig, seed: int = 0, dtype: DTypeLike = jnp.float32) -> Decoder:
    """A decoder with random weights, for tests and for benchmarks of shapes without weights."""
    return Decoder(config, rngs=nnx.Rngs(params=seed), dtype=dtype)


def abstract_decoder(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Decoder:
    """The same tree with ``jax.ShapeDtypeStruct`` leaves: what a loader must fill, without allocating anything."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=None, dtype=dtype))
