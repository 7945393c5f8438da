"""Prompts of a policy whose layers share their slots, layer by layer: each is read and weighed, then each is laid out.

The numbers are those of :mod:`kvjax.runtime.choice_of_all_layers`, one program of all layers. Here two programs serve
every layer: one reads the prompt, leaves its keys and values whole, and weighs them; one lays a layer out in the pool,
and in the first layer chooses among all before. A prompt that is repeated takes a third. On one device alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
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
from kvjax.runtime.choice_of_all_layers import chosen_of_all, lay_out_one, weigh_one
from kvjax.runtime.kvzip_prefill_by_layers import (
    Pass,
    Peak,
    Whole,
    hold_layer,
    holding,
    new_cache,
    repeat_once,
    unread,
)
from kvjax.runtime.prefill import after_reading
from kvjax.runtime.single_layer_programs import (
    Begun,
    LayerInput,
    LayerwisePrompt,
    Reading,
    before_the_first,
    own_layer,
    zeros_are_sent,
)
from kvjax.sharding.compile import Device, Program, put


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
    read: LayerInput,
    *,
    number: int,
    pages: tuple[int, ...],
    dtype: Any,
    storage: Storage,
) -> tuple[Whole, Weighed, Float[Array, "B T M"], Float[Array, "B V"]]:
    """Read a prompt in one layer, keep all of it, and say what it is worth."""
    policy, fresh = device.local_policy, cache is None
    (whole, _), x, logits = hold_layer(device, ends, layer, cache, x, read, number=number)
    before = new_cache(device, number, read, pages, dtype, storage) if cache is None else cache
    view = own_layer(before, read.index)
    old: Any = view if fresh else policy.sort_slots(number, view, layer.config)
    given = number, layer.config, old, whole[:2], read.counts, whole[2]
    return whole, weigh_one(policy, *given, pages=pages, fresh=fresh), x, logits


def repeat_and_weigh_layer(
    device: Device,
    ends: Decoder,
    layer: DecoderLayer,
    cache: Cache | None,
    x: Float[Array, "B W M"],
    peak: Float[Array, "B H S"] | None,
    whole: Whole,
    read: LayerInput,
    this: Pass,
    *,
    number: int,
    pages: tuple[int, ...],
    dtype: Any,
    storage: Storage,
) -> tuple[Weighed, Float[Array, "B W M"], Peak]:
    """A pass through one layer that holds a prompt; in the final one what the prompt is worth, before it zeros."""
    policy, fresh = device.local_policy, cache is None
    before = new_cache(device, number, read, pages, dtype, storage) if cache is None else cache
    once = repeat_once(policy, ends, layer, before, x, peak, whole, read, this, number=number, fresh=fresh)

    def weigh() -> Weighed:
        given = number, layer.config, once.ordered, whole[:2], read.counts, once.signals
        return weigh_one(policy, *given, pages=pages, fresh=fresh)

    return jax.lax.cond(this.final, weigh, lambda: unread(weigh)), once.x, once.peak


def lay_out_layer(
    device: Device,
    cache: Cache | None,
    made: Cache,
    chosen: Chosen,
    whole: tuple[Array, Array],
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


HOLD_AND_WEIGH_LAYER = Program(hold_and_weigh_layer, None, ("number", "pages", "dtype", "storage"), (3,))
REPEAT_AND_WEIGH_LAYER = Program(repeat_and_weigh_layer, None, ("number", "pages", "dtype", "storage"), (3, 4))
LAY_OUT_LAYER = Program(lay_out_layer, None, ("number", "pages", "dtype", "storage"), (1, 2))
EMPTY_POOL = Program(empty_pool, None, ("pages", "dtype", "storage"))


def choosing_by_layers(prompt: LayerwisePrompt) -> Reading:
    """:func:`kvjax.runtime.prefill_by_layers.reading_by_layers` of prompts whose layers choose together.

    The prompt's ``note`` has nothing to hear: a cache that is consumed goes when the new one is whole.
    """
    device, cache, rows, (pages,) = prompt.device, prompt.cache, len(prompt.count), prompt.pages
    sizes: dict[str, Any] = {"pages": pages, "dtype": jnp.dtype(prompt.dtype), "storage": prompt.storage}
    weigh = _weighed if device.policy.signals.repeat is None else _repeated_and_weighed
    held, weighed, begun, logits = yield from weigh(prompt, sizes)
    made = _to_be(device, cache, rows, sizes)
    each, candidates = (rows, len(pages)), weighed[0].scores.shape[2]
    nothing: Any = np.zeros((*each, candidates), bool), np.zeros(each, np.int32), np.zeros(each, np.int32)
    one, chosen = made, Chosen(*put(device, nothing))
    bare = tuple(dataclasses.replace(layer, marks={}, state=None) for layer in weighed)
    for i, (_, number, before, read) in enumerate(prompt.layers(cache)):
        (k, v, _), held[i] = held[i], None
        given = before, made, chosen, (k, v), weighed[i].marks, bare, read
        one, chosen = LAY_OUT_LAYER(device, *given, number=number, **sizes)
        made = made.replace(layers=one.layers)
        yield begun.after(one.seen, 0.0)
    (pool,), states = one.layers, tuple(layer.state for layer in weighed)
    pool = pool.replace(state=None if all(state is None for state in states) else states)
    return prompt.done(one, [pool]), logits


#: What layers hold, what they are worth, what was begun, and the logits.
_Weighed = Generator[Array, None, tuple[list[Any], list[Weighed], Begun, Array]]


def _weighed(prompt: LayerwisePrompt, sizes: dict[str, Any]) -> _Weighed:
    """Read a prompt in all layers, which weigh it."""
    begun = Begun(prompt.tokens, prompt.count, len(prompt.params.layers))
    held, weighed, x, logits = [], [], before_the_first(prompt.device, prompt.read.tokens, prompt.params), None
    for layer, number, before, read in prompt.layers(prompt.cache):
        given = prompt.ends, layer, before, x, read
        whole, one, x, logits = HOLD_AND_WEIGH_LAYER(prompt.device, *given, number=number, **sizes)
        held.append(whole)
        weighed.append(one)
        yield begun.after(whole[0])
    assert logits is not None  # a model has layers
    return held, weighed, begun, logits


def _repeated_and_weighed(prompt: LayerwisePrompt, sizes: dict[str, Any]) -> _Weighed:
    """Read a prompt in all layers and repeat it; in the last pass they weigh it."""
    held, x, passes, begun, logits = yield from holding(prompt)
    weighed: list[Weighed] = []
    for this in passes:
        for i, (layer, number, before, read) in enumerate(prompt.layers(prompt.cache)):
            whole, peak = held[i]
            given = prompt.ends, layer, before, x, peak, whole, read, this
            one, x, peak = REPEAT_AND_WEIGH_LAYER(prompt.device, *given, number=number, **sizes)
            held[i] = whole, peak
            weighed += [one] if this.final else []
            yield begun.after(one.budget, x.shape[1])
    return [whole for whole, _ in held], weighed, begun, logits


def _to_be(device: Device, cache: Cache | None, rows: int, sizes: dict[str, Any]) -> Cache:
    """The cache that layers are laid out in: an empty pool of all of them, with the counters of before."""
    counters: Any = np.zeros((rows,), np.int32), np.full((rows,), NO_TOKEN, np.int32)
    zeros, no_token = put(device, counters)
    if zeros_are_sent():
        shapes = jax.eval_shape(lambda: empty_pool(device, zeros, **sizes))
        pool: Any = put(device, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))
    else:
        pool = EMPTY_POOL(device, zeros, **sizes)
    if cache is None:
        return Cache((pool,), zeros, zeros, no_token, device.policy, 0, 0)
    if pool.scales is not None:
        pool = pool.replace(scales=dataclasses.replace(pool.scales, clipped=cache.layers[0].scales.clipped))
    return cache.replace(layers=(pool,))
