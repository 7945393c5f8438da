"""The forward pass of whole prompts one layer at a time, for calibration and evaluation.

Each layer is a program of its own, so the memory is that of the weights, of one layer's keys and values, and of what
the observer takes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.buckets import block_of, prompt_bucket
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.rope import Angles, angles_of_layers, prompt_positions
from kvjax.runtime.layer_observer import LayerObserver
from kvjax.runtime.prefill_layer import read_layer


def forward_layers(
    params: Decoder, prompts: Sequence[Sequence[int]], observer: LayerObserver
) -> Iterator[tuple[Float[Array, "B T M"], Any]]:
    """Read prompts through the model, and say of each layer what an observer saw.

    Args:
      params: the model.
      prompts: token ids, a row each.
      observer: a pytree whose static fields decide what is compiled.

    Yields:
      For each layer the hidden states after it, of T tokens (the longest prompt's bucket), and the observation. The
      hidden states are consumed by the next layer.
    """
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    tokens = np.zeros((len(prompts), prompt_bucket(int(lengths.max()))), np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    count = jnp.asarray(lengths)
    positions = prompt_positions(count, tokens.shape[1], fresh=True)
    angles = angles_of_layers([layer.config for layer in params.layers], positions, count)
    x = _embed(params, jnp.asarray(tokens))
    for layer, rope in zip(params.layers, angles, strict=True):
        x, found = read_one(layer, x, rope, count, observer)
        yield x, found


@jax.jit
def _embed(params: Decoder, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
    return params.embed(tokens)


@functools.partial(jax.jit, donate_argnames=("x",))
def read_one(
    layer: DecoderLayer, x: Float[Array, "B T M"], rope: Angles, count: Int[Array, " B"], observer: LayerObserver
) -> tuple[Float[Array, "B T M"], Any]:
    """One layer over padded prompts: hidden states out, and what the observer saw; the ones given are consumed."""
    block = block_of(x.shape[1])
    blocks = (jnp.max(count) + block - 1) // block
    after, _, _, found = read_layer(layer, x, rope, None, blocks, jnp.int32(0), observer, count)
    return after, found
