"""Prefill: a prompt, a chunk of one, or a later turn becomes a compressed cache, layer by layer and block by block.

A layer's keys and values exist whole only while that layer runs: queries go through it in blocks, each against the
blocks before it (and the slots kept from earlier turns), then the policy packs what it keeps and the rest is dead.
Nothing of size T x T is ever made. Rows are padded on the right and go through a layer a few at a time; a block in
which these have ended is skipped, and products on CPUs skip the padding of others, so time follows the prompts and not
their buckets.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.buckets import block_of
from kvjax.cache.cache import NO_TOKEN, Cache
from kvjax.cache.groups import parts, rounded
from kvjax.cache.quantisation import Storage
from kvjax.cache.shared_context import SharedContext
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder
from kvjax.model.rope import angles_of_layers, prompt_positions
from kvjax.policies.base import Policy
from kvjax.policies.empty_cache import empty_cache
from kvjax.policies.full import Full
from kvjax.policies.page_capacities import page_capacities
from kvjax.policies.signals import PromptSignals
from kvjax.runtime.alike_layers import numbers_of_kind
from kvjax.runtime.kvzip_prefill import read_then_choose
from kvjax.runtime.prefill_and_compress import read_and_compress, read_and_compress_once
from kvjax.runtime.prefill_layer import zero_after
from kvjax.runtime.signal_collector import SignalCollector, signal_collector
from kvjax.sharding.compile import Device

Pages = tuple[tuple[int, ...], ...]


def through_layers(
    params: Decoder,
    policy: Policy,
    first: int,
    caches: tuple[Any, ...],
    x: Float[Array, "B T M"],
    seen: Int[Array, " B"],
    count: Int[Array, " B"],
    total: Int[Array, " B"],
    pages: Pages,
    *,
    fresh: bool,
    collector: SignalCollector | None,
    work: Int[Array, " B"] | None = None,
    context: SharedContext | None = None,
) -> tuple[tuple[Any, ...], Float[Array, "B T M"], PromptSignals | None]:
    """Read tokens through layers ``first .. first + len(caches) - 1``.

    Args:
      x: what layer ``first`` reads, of ``count`` tokens a row after ``seen``.
      caches: of those layers; ``pages`` of each afterwards.
      work: tokens of each row to compute, where that is not ``count``: 0 of a row of padding.
      context: what the rows of all layers share, if they do.

    Returns:
      Their caches, what the next layer reads, and what ``collector`` asked of the last of them.
    """
    configs = [layer.config for layer in params.layers][first : first + len(caches)]
    angles = angles_of_layers(configs, prompt_positions(seen, x.shape[1], fresh), seen + count)
    done: list[Any] = []
    signals = None
    zero = jnp.int32(0) if first == 0 else zero_after(x)
    chunk = (seen, count, count if work is None else work, total)
    numbers = numbers_of_kind(policy, params)
    held = None if context is None else context.by_layer()
    for i, (old, counts) in enumerate(zip(caches, pages, strict=True), first):
        number, alike = numbers[i]
        read = read_and_compress_once if alike else read_and_compress
        shared = (None,) * len(parts(old)) if held is None else held[i]
        given = params.layers[i], old, x, angles[i - first], chunk, zero, collector, shared
        packed, x, zero, signals = read(policy, number, *given, pages=counts, fresh=fresh)
        done.append(packed)
    return tuple(done), x, signals


def _forward(
    params: Decoder,
    cache: Cache,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    total: Int[Array, " B"],
    pages: Pages,
    fresh: bool,
) -> tuple[Cache, Float[Array, "B T M"]]:
    """Hidden states of the last layer and the cache after these tokens; see :func:`prefill`."""
    policy = cache.policy
    collector = signal_collector(policy, params.config, cache.seen, count, total, tokens.shape[1], fresh)
    x, work = params.embed(jnp.maximum(tokens, 0)), jnp.where(tokens[:, 0] < 0, 0, count)
    given = x, cache.seen, count, total, pages
    how: dict[str, Any] = {"fresh": fresh, "collector": collector, "work": work}
    if policy.signals.repeat is None and not policy.shares_layers:
        layers, x, _ = through_layers(params, policy, 0, cache.layers, *given, **how, context=cache.context)
    else:
        layers, x = read_then_choose(params, cache, tokens, *given, **how)
    return after_reading(cache.replace(layers=layers), count), x


def after_reading(cache: Cache, count: Int[Array, " B"]) -> Cache:
    """The counters once ``count`` tokens of each row are in."""
    seen = cache.seen + count
    prompt_end = jnp.where(count > 0, seen, cache.prompt_end)
    return cache.replace(seen=seen, prompt_end=prompt_end, next_token=jnp.where(count > 0, NO_TOKEN, cache.next_token))


def last_hidden(x: Float[Array, "B T M"], count: Int[Array, " B"]) -> Float[Array, "B M"]:
    """Each row's last token; the first of a row without any."""
    return jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]


def last_logits(params: Decoder, x: Float[Array, "B T M"], count: Int[Array, " B"]) -> Float[Array, "B V"]:
    """Logits after each row's last token."""
    return params.logits(last_hidden(x, count))


def read_fresh(
    device: Device,
    params: Decoder,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    total: Int[Array, " B"],
    *,
    prompt_capacity: int,
    new_capacity: int,
    dtype: Any,
    storage: Storage,
) -> tuple[Cache, Float[Array, "B T M"]]:
    """Read prompts into a new cache.

    Args:
      device: gives the policy, and allocates the cache.
      params: the model.
      tokens: token ids padded on the right to a bucket; a row that begins with -1 is one of padding, and not computed.
      count: tokens of each row; at least 1.
      total: tokens of each row's whole prompt, of which this may be the first chunk.
      prompt_capacity, new_capacity, dtype, storage: of the cache; static.

    Returns:
      The cache, and the last layer's output.
    """
    cache = device.empty(tokens.shape[0], prompt_capacity, new_capacity, dtype, storage)
    return _forward(params, cache, tokens, count, total, tuple(c.pages for c in cache.layers), fresh=True)


def prefill_fresh(
    device: Device, params: Decoder, tokens: Array, count: Array, total: Array, **static: Any
) -> tuple[Cache, Float[Array, "B V"]]:
    """:func:`read_fresh`, and the logits after each row's last token (float32)."""
    cache, x = read_fresh(device, params, tokens, count, total, **static)
    return cache, last_logits(params, x, count)


def read_onto(
    device: Device,
    params: Decoder,
    cache: Cache,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    total: Int[Array, " B"],
    *,
    prompt_capacity: int,
    new_capacity: int,
    own_capacity: int | None = None,
) -> tuple[Cache, Float[Array, "B T M"]]:
    """Read chunks or later turns onto a cache, which then has the given capacities; rows may have 0 tokens."""
    capacities = {"prompt_capacity": prompt_capacity, "new_capacity": new_capacity, "own_capacity": own_capacity}
    pages = pages_onto(device.local_config, cache, **capacities)
    cache, x = _forward(params, cache, tokens, count, total, pages, fresh=False)
    return cache.replace(**capacities, joined_tokens=0), x


def prefill_onto(
    device: Device, params: Decoder, cache: Cache, tokens: Array, count: Array, total: Array, **static: Any
) -> tuple[Cache, Float[Array, "B V"]]:
    """:func:`read_onto`, and the logits after each row's last token (float32)."""
    cache, x = read_onto(device, params, cache, tokens, count, total, **static)
    return cache, last_logits(params, x, count)


def pages_onto(
    config: ModelConfig, cache: Cache, prompt_capacity: int, new_capacity: int, own_capacity: int | None = None
) -> Pages:
    """Pages after a turn: planned anew, or as they are for a policy that keeps its size.

    Rows that share a context hold the rest of it, and ``own_capacity`` tokens of prompt beyond it.
    """
    old = tuple(layer.pages for layer in cache.layers)
    if not cache.policy.replans:
        return old
    wanted = page_capacities(cache.policy, config, prompt_capacity, new_capacity, cache.page_size, own_capacity)
    wanted = tuple(rounded(layer, pages) for layer, pages in zip(cache.layers, wanted, strict=True))
    if cache.policy.grows:
        return wanted
    # A bounded cache never shrinks: a shorter bucket's turn reuses what is allocated.
    return tuple(tuple(max(pair) for pair in zip(*layers, strict=True)) for layers in zip(old, wanted, strict=True))


@jax.jit
def logits_of(params: Decoder, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Float[Array, "B T V"]:
    """Float32 logits after every token, through the prefill path with a full cache; T is padded to a bucket or block.

    For tests and scoring: it holds T x V numbers, which generation never does.
    """
    size = block_of(tokens.shape[1])
    padded = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % size)))
    cache = empty_cache(params.config, Full(), tokens.shape[0], padded.shape[1], 1, params.dtype)
    pages = tuple(c.pages for c in cache.layers)
    _, x = _forward(params, cache, padded, lengths, lengths, pages, fresh=True)
    return params.logits(x[:, : tokens.shape[1]])
