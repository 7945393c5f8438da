"""The decoder as one device of a mesh has it: its share of every weight, and the collectives between the devices.

In a layer: after the output projection and after the MLP a sum over the model axis (``psum``). Where heads do not
divide by the devices, or are in groups, each device also needs other devices' columns of queries, keys and values: an
``all_gather`` of the new tokens' projections before attention and one of its results after it, of B x H x G x D numbers
each. Embedding a token is a sum over the model axis, logits are gathered before they are sampled from.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.buckets import block_of
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.matmul import matmul
from kvjax.sharding.partition import Group, Partition
from kvjax.sharding.placement import Splits, splits


class LocalLayer:
    """A :class:`DecoderLayer` on one device; inside ``jax.shard_map`` only."""

    def __init__(self, layer: DecoderLayer, part: Partition, index: int, split: Splits):
        self.layer, self.whole, self.split = layer, part.config, split
        self.groups = part.groups(index)
        self.config: ModelConfig = part.config_of(index)

    @property
    def _alone(self) -> Group | None:
        """The layer's only group, dealt in the order of the weights' columns; None where columns must be reordered."""
        only = self.groups[0] if len(self.groups) == 1 else None
        return only if only and only.sharding.head_axes == self.split.heads.head_axes else None

    def project(self, x: Float[Array, "*S M"]) -> tuple[Float[Array, "*S H G D"], Array, Array]:
        """As :meth:`DecoderLayer.project`, of the heads that this device has."""
        c = self.config
        flat = matmul(self.layer.input_norm(x), self.layer.qkv[...])
        if c.qkv_bias:
            flat = flat + self.layer.qkv_bias[...]
        alone = self._alone
        if alone is not None and self.split.qkv:
            flat = _gather(flat, alone.sharding.page_axes)
            qkv = flat.reshape(*x.shape[:-1], alone.count, c.group_size + 2, c.head_dim)
        else:
            flat = _gather(flat, self.split.order) if self.split.qkv else flat
            every = flat.reshape(*x.shape[:-1], self.whole.num_kv_heads, c.group_size + 2, c.head_dim)
            qkv = jnp.concatenate([_block(every, group) for group in self.groups], axis=-3)
        return qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]

    def finish(self, x: Float[Array, "*S M"], attended: Float[Array, "*S H G D"]) -> Float[Array, "*S M"]:
        """As :meth:`DecoderLayer.finish`, given this device's heads; the result is the same on all."""
        c, layer = self.config, self.layer
        y = matmul(self._rows(attended), layer.out[...])
        y = jax.lax.psum(y, self.split.order) if self.split.qkv and self.split.order else y
        x = x + (y + layer.out_bias[...] if c.output_bias else y)
        y = matmul(layer.activated(layer.post_attention_norm(x)), layer.down[...])
        y = jax.lax.psum(y, self.split.order) if self.split.mlp and self.split.order else y
        return x + (y + layer.down_bias[...] if c.mlp_bias else y)

    def _rows(self, attended: Float[Array, "*S H G D"]) -> Float[Array, "*S N"]:
        """The channels that this device's rows of the output projection multiply."""
        flat = (*attended.shape[:-3], -1)
        alone = self._alone
        if alone is not None and self.split.qkv:
            return _part(attended.reshape(flat), alone.sharding.page_axes, alone.sharding.page_parts)
        heads, start = [], 0
        for group in self.groups:
            heads.append(_gather(attended[..., start : start + group.count, :, :], group.sharding.head_axes, axis=-3))
            start += group.count
        order = np.argsort([head for group in self.groups for head in group.heads])
        whole = jnp.concatenate(heads, axis=-3)[..., order, :, :].reshape(flat)
        return _part(whole, self.split.order, self.split.parts) if self.split.qkv else whole


class LocalDecoder:
    """A :class:`Decoder` on one device; inside ``jax.shard_map`` only."""

    def __init__(self, params: Decoder, part: Partition):
        self._params, self._split = params, splits(part.mesh, part.config)
        self.config = part.config_of(0)
        self.layers = [LocalLayer(layer, part, i, self._split) for i, layer in enumerate(params.layers)]

    @property
    def dtype(self) -> Any:
        return self._params.dtype

    def embed(self, tokens: Int[Array, "*S"]) -> Float[Array, "*S M"]:
        """As :meth:`Decoder.embed`: every token's vector is on one device, and zeros on the others."""
        params, order = self._params, self._split.order
        if not (self._split.vocab and order):
            return params.embed(tokens)
        x = self._summed(tokens) if tokens.ndim == 1 else self._in_blocks(tokens)
        return params.embedding_norm(x) if self.config.embedding_norm else x

    def _summed(self, tokens: Int[Array, "*S"]) -> Float[Array, "*S M"]:
        order, table = self._split.order, self._params.table
        count = table.shape[0]
        own = tokens - jax.lax.axis_index(order) * count
        index = jnp.clip(own, 0, count - 1)
        x = table[index]
        return jax.lax.psum(jnp.where(((own >= 0) & (own < count))[..., None], x, jnp.zeros((), x.dtype)), order)

    def _in_blocks(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        """A prompt block by block: a sum over devices has another buffer as its result, as large as all hidden states.

        Compiled for a v5e, 8 rows of 32,768 tokens, 4,096 channels: 2 GiB less at the peak.
        """
        size = block_of(tokens.shape[1])

        def body(i: Int[Array, ""], x: Array) -> Array:
            block = jax.lax.dynamic_slice_in_dim(tokens, i * size, size, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(x, self._summed(block), i * size, axis=1)

        empty = jnp.zeros((*tokens.shape, self.config.hidden_size), self.dtype)
        return jax.lax.fori_loop(0, tokens.shape[1] // size, body, empty)

    def logits(self, x: Float[Array, "*S M"]) -> Float[Array, "*S V"]:
        """As :meth:`Decoder.logits`, of the whole vocabulary on every device."""
        found = self._params.logits(x)
        return _gather(found, self._split.order) if self._split.vocab else found


def _gather(x: Array, axes: tuple[str, ...], axis: int = -1) -> Array:
    return jax.lax.all_gather(x, axes, axis=axis % x.ndim, tiled=True) if axes else x


def _part(x: Float[Array, "*S N"], axes: tuple[str, ...], parts: int) -> Array:
    """This device's of equal parts of the last axis."""
    if not axes:
        return x
    size = x.shape[-1] // parts
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, axis=-1)


def _block(every: Float[Array, "*S H N D"], group: Group) -> Array:
    """This device's heads of a group."""
    heads = every[..., np.asarray(group.heads), :, :]
    if not group.sharding.head_axes:
        return heads
    return jax.lax.dynamic_slice_in_dim(heads, group.sharding.first_head(group.count), group.count, axis=-3)
