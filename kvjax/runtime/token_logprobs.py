"""Log-probabilities of given tokens, from prefill, and the likeliest tokens: few logits are alive at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.cache import Cache
from kvjax.cache.host_memory import as_numpy
from kvjax.model.decoder import Decoder
from kvjax.runtime.prefill import last_logits, read_fresh, read_onto
from kvjax.runtime.sampling import argmax, log_probability
from kvjax.sharding.compile import Device

#: The most bytes of float32 logits that are made at once; one token of every row has its logits whatever they take.
_LOGITS_BYTES = 1 << 26
_MOST_TOKENS = 64  # every bucket of lengths is a multiple of it


def token_logprobs(
    params: Decoder, x: Float[Array, "B T M"], count: Int[Array, " B"], following: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Int[Array, "B T"]]:
    """Natural logs of the model's probability of what follows each token, and the likeliest id in its place.

    Beyond ``count`` they mean nothing.

    Args:
      x: the last layer's output, of a bucket of tokens.
      following: ids.
    """
    batch, tokens, _ = x.shape
    size = _tokens_together(batch, params.config.vocab_size)

    def body(i: Int[Array, ""], found: tuple[Array, Array]) -> tuple[Array, Array]:
        xb, ids = (jax.lax.dynamic_slice_in_dim(a, i * size, size, axis=1) for a in (x, following))
        logits = params.logits(xb).reshape(batch * size, -1)
        new = log_probability(logits, ids.reshape(-1)), argmax(logits)
        logprobs, best = (
            jax.lax.dynamic_update_slice_in_dim(old, value.reshape(batch, size), i * size, axis=1)
            for old, value in zip(found, new, strict=True)
        )
        return logprobs, best

    blocks = (jnp.max(count) + size - 1) // size
    empty = jnp.zeros((batch, tokens), jnp.float32), jnp.zeros((batch, tokens), jnp.int32)
    return jax.lax.fori_loop(0, blocks, body, empty)


def _tokens_together(batch: int, vocabulary: int) -> int:
    size = _MOST_TOKENS
    while size > 1 and batch * size * vocabulary * 4 > _LOGITS_BYTES:
        size //= 2
    return size


def scoring_bytes(batch: int, vocabulary: int) -> int:
    """Temporary bytes of :func:`token_logprobs`: the logits of a few tokens, and as much again for their softmax."""
    return 2 * batch * _tokens_together(batch, vocabulary) * vocabulary * 4


def score_fresh(
    device: Device, params: Decoder, tokens: Array, count: Array, total: Array, following: Array, **static: Any
) -> tuple[Cache, Float[Array, "B V"], Float[Array, "B T"], Int[Array, "B T"]]:
    """:func:`kvjax.runtime.prefill.prefill_fresh`, and :func:`token_logprobs`."""
    cache, x = read_fresh(device, params, tokens, count, total, **static)
    return cache, last_logits(params, x, count), *token_logprobs(params, x, count, following)


def score_onto(
    device: Device,
    params: Decoder,
    cache: Cache,
    tokens: Array,
    count: Array,
    total: Array,
    following: Array,
    **static: Any,
) -> tuple[Cache, Float[Array, "B V"], Float[Array, "B T"], Int[Array, "B T"]]:
    """:func:`kvjax.runtime.prefill.prefill_onto`, and :func:`token_logprobs`."""
    cache, x = read_onto(device, params, cache, tokens, count, total, **static)
    return cache, last_logits(params, x, count), *token_logprobs(params, x, count, following)


def next_logprobs(logits: Float[Array, "B V"], rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """The log-probability of each of these tokens after a row of logits."""
    return as_numpy(_chosen(logits, np.asarray(rows, np.int32), np.asarray(tokens, np.int32))).tolist()


def next_tokens(logits: Float[Array, "B V"], rows: Sequence[int]) -> list[int]:
    """The likeliest token after each of these rows of logits."""
    return as_numpy(_best(logits, np.asarray(rows, np.int32))).tolist()


@jax.jit
def _best(logits: Float[Array, "B V"], rows: Int[Array, " N"]) -> Int[Array, " N"]:
    return argmax(logits[rows])


@jax.jit
def _chosen(logits: Float[Array, "B V"], rows: Int[Array, " N"], tokens: Int[Array, " N"]) -> Float[Array, " N"]:
    return jax.vmap(lambda row, token: log_probability(logits[row][None], token[None])[0])(rows, tokens)
