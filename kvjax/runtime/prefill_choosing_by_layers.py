"""Prompts of a policy whose layers share their slots, layer by layer: each is read and weighed, then each is laid out.

The numbers are those of :mod:`kvjax.runtime.choice_of_all_layers`, one program of all layers. Here two programs serve
every layer: one reads the prompt, and repeats it if the policy asks for that, leaves its keys and values whole, and
weighs them; one lays a layer out in the pool, and in the first layer chooses among all before. On one device alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.cache import NO_TOKEN, Cache
from kvjax.cache.pool import LayerCache
from kvjax.cache.quantisation import Storage
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.policies.base import Weighed
from kvjax.runtime.choice_of_all_layers import Dense, chosen_of_all, lay_out_one, weigh_one
from kvjax.runtime.kvzip_prefill_by_layers import Fed, fed_first, new_cache, read_whole
from kvjax.runtime.prefill import after_reading
from kvjax.runtime.single_layer_programs import (
    Begun,
    LayerInput,
    LayerwisePrompt,
    Reading,
    before_the_first,
    logits_of_last,
    own_layer,
    put_as_weights,
    zeros_are_sent,
)
from kvjax.sharding.compile import Device, Program


class Chosen(NamedTuple):
    """The choice for all layers and their A heads: the candidates, how many of each head, where its run begins."""

    keep: Bool[Array, "B A N"]
    length: Int[Array, "B A"]
    starts: Int[Array, "B A"]


def hold_and_weigh_layer(
    device: Device,
    ends: Decoder,
    layer: DecoderLayer,
    cache: Cache | None,
    x: Float[Array, "B T M"],
    fed: Fed,
    read: LayerInput,
    *,
    number: int,
    pages: tuple[int, ...],
    dtype: Any,
    storage: Storage,
) -> tuple[Dense, Weighed, Float[Array, "B T M"], Fed, Float[Array, "B V"]]:
    """Read a prompt in one layer, keep all of it, and say what it is worth."""
    fresh = cache is None
    before = new_cache(device, number, read, pages, dtype, storage) if cache is None else cache
    whole, x, fed = read_whole(device, ends, layer, before, x, fed, read, number, fresh=fresh)
    dense = whole.k, whole.v
    given = number, layer.config, whole.ordered, dense, read.counts, whole.signals
    weighed = weigh_one(device.local_policy, *given, pages=pages, fresh=fresh)
    return dense, weighed, x, fed, logits_of_last(ends, read, x)


def lay_out_layer(
    device: Device,
    cache: Cache | None,
    made: Cache,
    chosen: Chosen,
    whole: Dense,
    marks: dict[str, Array],
    weighed: tuple[Weighed, ...],
    read: LayerInput,
    *,
    number: int,
    pages: tuple[int, ...],
    dtype: Any,
    storage: Storage,
) -> tuple[Cache, Chosen]:
    """Write what stays of a layer into the pool of ``made``; the first layer's call chooses for all that were weighed.

    Args:
      cache: before the prompt, as :func:`layer_of` gives it. made: the pool to be, with the counters of before.
      chosen: of the call before, of the first call anything of that shape.
      whole, marks: of this layer. weighed: of all layers, without marks and state.
    """
    policy, (pool,), fresh = device.local_policy, made.layers, cache is None
    before = new_cache(device, number, read, pages, dtype, storage) if cache is None else cache

    def choose() -> Chosen:
        keep, length, starts = chosen_of_all(policy, pool, weighed, read.counts[1], pages)
        return Chosen(jnp.concatenate(keep, axis=1), length, starts)

    chosen = jax.lax.cond(read.first, choose, lambda: chosen)
    config, layers = device.local_config, pool.model_layers
    heads = len(pages) // layers

    def own(x: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, read.index * heads, heads, axis=1)

    view = own_layer(before, read.index)
    old: Any = view if fresh else policy.sort_slots(number, view, config)
    given = old, whole, own(chosen.keep), marks, own(chosen.starts), jnp.int32(0), read.counts
    laid, k_scale = lay_out_one(config, pool, *given, layers=layers, pages=pages, fresh=fresh)
    if laid.scales is not None and k_scale is not None:
        k = jax.lax.dynamic_update_slice_in_dim(laid.scales.k, k_scale, read.index * heads, axis=1)
        laid = laid.replace(scales=dataclasses.replace(laid.scales, k=k))
    laid = laid.replace(length=chosen.length, next=chosen.length, row_starts=chosen.starts)
    return after_reading(made.replace(layers=(laid,)), read.counts[1]), chosen


def empty_pool(
    device: Device, seen: Int[Array, " B"], *, pages: tuple[int, ...], dtype: Any, storage: Storage
) -> LayerCache:
    """A pool of all layers with nothing in it."""
    pool: Any = device.empty_layer(0, len(seen), pages, dtype, storage)
    return pool.replace(state=None)


HOLD_AND_WEIGH_LAYER = Program(hold_and_weigh_layer, None, ("number", "pages", "dtype", "storage"), (3, 4))
LAY_OUT_LAYER = Program(lay_out_layer, None, ("number", "pages", "dtype", "storage"), (1, 2))
EMPTY_POOL = Program(empty_pool, None, ("pages", "dtype", "storage"))


def choosing_by_layers(prompt: LayerwisePrompt) -> Reading:
    """:func:`kvjax.runtime.prefill_by_layers.reading_by_layers` of prompts whose layers choose together.

    The prompt's ``note`` has nothing to hear: a cache that is consumed goes when the new one is whole.
    """
    device, cache, rows, (pages,) = prompt.device, prompt.cache, len(prompt.count), prompt.pages
    sizes: dict[str, Any] = {"pages": pages, "dtype": jnp.dtype(prompt.dtype), "storage": prompt.storage}
    begun = Begun(prompt.tokens, prompt.count, len(prompt.params.layers))
    held, weighed, logits = [], [], None
    x, fed = before_the_first(device, prompt.read.tokens, prompt.params), fed_first(prompt, device.policy)
    for layer, number, before, read in prompt.layers(cache):
        given = prompt.ends, layer, before, x, fed, read
        dense, one, x, fed, logits = HOLD_AND_WEIGH_LAYER(device, *given, number=number, **sizes)
        held.append(dense)
        weighed.append(one)
        yield begun.after(dense[0])
    del x, fed
    assert logits is not None  # a model has layers
    made = _to_be(prompt, sizes)
    each, candidates = (rows, len(pages)), weighed[0].scores.shape[2]
    nothing: Any = np.zeros((*each, candidates), bool), np.zeros(each, np.int32), np.zeros(each, np.int32)
    one, chosen = made, Chosen(*put_as_weights(device, prompt.params, nothing))
    bare = tuple(dataclasses.replace(layer, marks={}, state=None) for layer in weighed)
    for i, (_, number, before, read) in enumerate(prompt.layers(cache)):
        dense, held[i] = held[i], None
        given = before, made, chosen, dense, weighed[i].marks, bare, read
        one, chosen = LAY_OUT_LAYER(device, *given, number=number, **sizes)
        made = made.replace(layers=one.layers)
        yield begun.after(one.seen, 0.0)
    (pool,), states = one.layers, tuple(layer.state for layer in weighed)
    pool = pool.replace(state=None if all(state is None for state in states) else states)
    return prompt.done(one, [pool]), logits


def _to_be(prompt: LayerwisePrompt, sizes: dict[str, Any]) -> Cache:
    """The cache that layers are laid out in: an empty pool of all of them, with the counters of before."""
    device, cache, rows = prompt.device, prompt.cache, len(prompt.count)
    counters = np.zeros((rows,), np.int32), np.full((rows,), NO_TOKEN, np.int32)
    zeros, no_token = put_as_weights(device, prompt.params, counters)
    if zeros_are_sent():
        shapes = jax.eval_shape(lambda: empty_pool(device, zeros, **sizes))
        pool: Any = put_as_weights(device, prompt.params, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))
    else:
        pool = EMPTY_POOL(device, zeros, **sizes)
    if cache is None:
        return Cache((pool,), zeros, zeros, no_token, device.policy, 0, 0)
    if pool.scales is not None:
        pool = pool.replace(scales=dataclasses.replace(pool.scales, clipped=cache.layers[0].scales.clipped))
    return cache.replace(layers=(pool,))
