"""The forward pass of prompts, run once and replayed for every policy.

A prompt that is read whole attends to all of itself, whatever the policy keeps afterwards: queries, keys and values
are the same for every policy and every budget. A comparison of 50 caches would compute them 50 times, which is nearly
all its time. :func:`record` computes them once; :class:`RecordedDecoder` stands in for the model in the runtime's own
prefill program and hands them out, so that what a policy sees and does is exactly what it sees and does in use: only
the weights' products are left out. Some policies cannot be replayed: see :func:`can_replay`.

Memory: (query heads + 2 KV heads) x head_dim numbers a token and layer; for 135M parameters 115 kB a token in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.cache.buckets import prompt_bucket
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.rope import Angles
from kvjax.policies.base import Policy
from kvjax.runtime.layer_forward import forward_layers
from kvjax.runtime.layer_observer import LayerObserver
from pallas_kernels.kept_tokens import KeptTokens


class _RecordedLayer(DecoderLayer):
    """A layer whose projections were made before; hidden states are (token, row) indices, which pass unchanged."""

    def __init__(self, q: Array, k: Array, v: Array, layer: DecoderLayer):
        self.q, self.k, self.v = nnx.Variable(q), nnx.Variable(k), nnx.Variable(v)
        self.config = layer.config
        if self.config.attention_sinks:
            self.sinks = layer.sinks

    def project(self, x: Float[Array, "*S M"]) -> tuple[Float[Array, "*S H G D"], Array, Array]:
        index, row = (x[..., i].astype(jnp.int32) for i in range(2))
        q, k, v = (made[...][row, index] for made in (self.q, self.k, self.v))
        return q, k, v

    def finish(self, x: Float[Array, "*S M"], attended: Float[Array, "*S H G D"]) -> Float[Array, "*S M"]:
        return x


class RecordedDecoder(Decoder):
    """Stands in for a model in prefill, for the prompts it was recorded with or their beginnings, and for no others."""

    def __init__(self, params: Decoder, layers: Sequence[_RecordedLayer], hidden: Float[Array, "B T M"]):
        self.layers = nnx.List(layers)
        self.hidden = nnx.Variable(hidden)
        self.norm, self.head = params.norm, params.head
        self.config = params.config

    def embed(self, tokens: Int[Array, "*S"]) -> Float[Array, "*S M"]:
        rows, count = tokens.shape
        index = (
            jnp.broadcast_to(jnp.arange(count), (rows, count)),
            jnp.broadcast_to(jnp.arange(rows)[:, None], (rows, count)),
        )
        return jnp.stack(index, axis=-1).astype(jnp.float32)  # exact to 2^24

    @property
    def stream(self) -> tuple[int, jnp.dtype]:
        return 2, jnp.dtype(jnp.float32)

    def logits(self, x: Float[Array, "*S M"]) -> Float[Array, "*S V"]:
        index, row = (x[..., i].astype(jnp.int32) for i in range(2))
        return super().logits(self.hidden[...][row, index])

    @property
    def nbytes(self) -> int:
        """Bytes of the record."""
        held = (variable for layer in self.layers for variable in (layer.q, layer.k, layer.v))
        return sum(variable[...].nbytes for variable in held)


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("tokens",))
@dataclasses.dataclass(frozen=True)
class Projections(LayerObserver):
    """Observes queries, keys and values of the first ``tokens`` tokens, before rotary embedding."""

    tokens: int

    def before_layer(self, layer: DecoderLayer, x: Float[Array, "B T M"], rope: Angles) -> tuple[Array, Array, Array]:
        """The projections."""
        return layer.project(x[:, : self.tokens])

    def finish(
        self, partial: None, before: tuple[Array, Array, Array], k: Array, kept: KeptTokens | None
    ) -> tuple[Array, Array, Array]:
        """The projections, as they were made before the layer ran."""
        return before


def record(params: Decoder, prompts: Sequence[Sequence[int]]) -> RecordedDecoder:
    """Run prompts through the model and keep what every layer projects.

    Args:
      params: the model.
      prompts: token ids, a row each.

    Returns:
      A decoder for ``read_prompts`` with these rows, or with as many first tokens of each as the caller likes.
    """
    # What lies beyond the longest prompt is padding: reading there gives the last token's, which nothing uses.
    observer = Projections(max(map(len, prompts)))
    read = list(forward_layers(params, prompts, observer))
    both = zip(read, params.layers, strict=True)
    layers = [_RecordedLayer(q, k, v, layer) for (_, (q, k, v)), layer in both]
    return RecordedDecoder(params, layers, jax.block_until_ready(read[-1][0]))


def can_replay(policy: Policy, config: ModelConfig) -> bool:
    """Whether a policy sees of a record what it would see of the model.

    One that reads prompts in chunks sees other hidden states; one that has them repeated, asks what values add to the
    output or looks at hidden states needs the weights.
    """
    asked = policy.signals
    return policy.chunks(config) is None and asked.repeat is None and not (asked.outputs or asked.hidden)


def record_bytes(config: ModelConfig, rows: int, tokens: int, itemsize: int) -> int:
    """Bytes a record of ``rows`` prompts of at most ``tokens`` tokens takes."""
    heads = config.num_heads + 2 * config.num_kv_heads
    return rows * prompt_bucket(tokens) * config.num_layers * heads * config.head_dim * itemsize
