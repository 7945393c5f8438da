"""A prompt read layer by layer, each layer by a program of its own, which layers of its kind share.

The numbers are those of the prefill of all layers in one program, which reads a prompt layer by layer too: a policy
that selects by attention over the entire prompt sees all of it, where pieces of the prompt would not do. Two things are
gained: a program of one layer of thirty is compiled, and read back from the compilation cache, in a small part of the
time; and what else has to run may run between layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.cache import NO_TOKEN, Cache
from kvjax.cache.continuation import delete
from kvjax.cache.quantisation import Storage
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.rope import angles_of_layers
from kvjax.policies.base import Policy
from kvjax.runtime.alike import numbers_of_kind
from kvjax.runtime.layer_step import Counts, read_and_compress
from kvjax.runtime.prefill import after_reading, last_hidden, pages_onto
from kvjax.runtime.signal_collector import signal_collector
from kvjax.sharding.compile import ROW, Device, Program, put
from kvjax.waiting import ready
from pallas_kernels import dispatch

#: Layers of a kind, on average, from which on a program a kind is compiled much faster than one of all layers.
_MANY_ALIKE = 4
#: Kinds of layers, programs each, that are worth the stops in between: so many, or half of the layers. Compiling them
#: takes no longer than one program of all layers does.
_FEW_KINDS = 4
#: Layers that are given to the device before the first of them is done: XLA's CPU client takes 32 programs, and then
#: lets the caller wait where no Ctrl-C is answered.
_AHEAD = 16
#: What a layer gives: a cache of it alone, what the next layer reads, and of that each row's last token.
LayerRead = tuple[Cache, Float[Array, "B T M"], Float[Array, "B M"]]
#: Static fields of a cache on which no program here depends, so that none is compiled again when they change.
_NO_CAPACITIES: dict[str, Any] = {"prompt_capacity": 0, "new_capacity": 0, "own_capacity": None, "joined_tokens": 0}


def can_stop_between_layers(policy: Policy, params: Decoder) -> bool:
    """Whether prompts may be read whole, layer by layer, by programs that serve several layers each."""
    most = max(_FEW_KINDS, len(params.layers) // 2)
    return policy.chunks(params.config) is None and _kinds(policy, params) <= most


def compiles_faster_by_layers(policy: Policy, params: Decoder) -> bool:
    """Whether the programs of single layers are compiled much faster than one of all layers.

    On a CPU not where a policy makes more kinds of them than the model has: of each kind a conversation has two
    programs, which take it as long as two of all layers. Elsewhere those of layers also need less memory: of 8 rows of
    32,768 tokens of an 8B model's 32 layers, compiled for v5e, 8.5 GiB at the peak where one of all layers needs 11.0.
    """
    kinds = _kinds(policy, params)
    few = kinds <= len({layer.config for layer in params.layers}) or dispatch.platform() != "cpu"
    return few and kinds * _MANY_ALIKE <= len(params.layers)


def _kinds(policy: Policy, params: Decoder) -> float:
    """Programs that read a layer under a policy; without end if layers are read twice, or share their slots."""
    if policy.signals.repeat is not None or policy.shares_layers:
        return np.inf
    return len({number for number, _ in numbers_of_kind(policy, params)})


def embed_prompt(device: Device, params: Decoder, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
    """What the first layer reads."""
    return params.embed(jnp.maximum(tokens, 0))


def prefill_layer_fresh(
    device: Device,
    layer: DecoderLayer,
    x: Float[Array, "B T M"],
    counts: Counts,
    *,
    number: int,
    pages: tuple[int, ...],
    dtype: Any,
    storage: Storage,
) -> LayerRead:
    """One layer of :func:`kvjax.runtime.prefill.prefill_fresh`; to the policy it is the layer of this number."""
    empty = device.empty_layer(number, x.shape[0], pages, dtype, storage)
    return _read(device, layer, _cache_of(device, empty, counts[0]), x, counts, number, empty.pages, fresh=True)


def prefill_layer_onto(
    device: Device,
    layer: DecoderLayer,
    cache: Cache,
    x: Float[Array, "B T M"],
    counts: Counts,
    *,
    number: int,
    pages: tuple[int, ...],
) -> LayerRead:
    """One layer of :func:`kvjax.runtime.prefill.prefill_onto`, of a cache of this layer alone."""
    return _read(device, layer, cache, x, counts, number, pages, fresh=False)


def _read(
    device: Device,
    layer: DecoderLayer,
    cache: Cache,
    x: Float[Array, "B T M"],
    counts: Counts,
    number: int,
    pages: tuple[int, ...],
    *,
    fresh: bool,
) -> LayerRead:
    seen, count, _, total = counts
    (angles,) = angles_of_layers([layer.config], seen[:, None] + jnp.arange(x.shape[1]), seen + count)
    collector = signal_collector(cache.policy, device.local_config, seen, count, total, x.shape[1], fresh)
    given = layer, cache.layers[0], x, angles, counts, jnp.int32(0), collector, cache.shared_layers[0]
    packed, x, _, _ = read_and_compress(cache.policy, number, *given, pages=pages, fresh=fresh)
    return cache.replace(layers=(packed,)), x, last_hidden(x, count)


def _cache_of(device: Device, layer: Any, seen: Any) -> Cache:
    """A cache of one layer, of which nobody needs the other counters."""
    return Cache((layer,), seen, seen, seen, device.local_policy, 0, 0)


def _layer_types(device: Device, arguments: Any, static: dict[str, Any]) -> Any:
    """What :func:`prefill_layer_fresh` results in, by the types that tell where it goes."""
    given = {name: static[name] for name in ("pages", "dtype", "storage")}
    layer = jax.eval_shape(lambda: device.empty_layer(static["number"], 1, **given))
    return _cache_of(device, layer, ROW), ROW, ROW


def prompt_logits(
    device: Device, params: Decoder, counters: Cache, last: Float[Array, "B M"], count: Int[Array, " B"]
) -> tuple[Cache, Float[Array, "B V"]]:
    """The counters of a cache after a prompt, without its layers, and the logits after each row's last token."""
    return after_reading(counters, count), params.logits(last)


EMBED_PROMPT = Program(embed_prompt, lambda device, arguments, static: ROW)
PREFILL_LAYER_FRESH = Program(prefill_layer_fresh, _layer_types, ("number", "pages", "dtype", "storage"), (1,))
PREFILL_LAYER_ONTO = Program(
    prefill_layer_onto, lambda device, arguments, static: (arguments[1], ROW, ROW), ("number", "pages"), (1, 2)
)
PROMPT_LOGITS = Program(prompt_logits, lambda device, arguments, static: (arguments[1], ROW))


def program_names(policy: Policy, params: Decoder, *, fresh: bool, onto: bool) -> list[str]:
    """Names of the programs of :func:`reading_by_layers`, into a new cache and onto one: a layer's for each kind."""
    kinds = int(_kinds(policy, params))
    first, *later = ["prefill_layer_fresh"] * fresh + ["prefill_layer_onto"] * onto
    return ["embed_prompt", *[first] * kinds, "prompt_logits", *later * kinds]


def reading_by_layers(
    params: Decoder,
    cache: Cache | None,
    tokens: Int[np.ndarray, "B T"],
    count: Int[np.ndarray, " B"],
    total: Int[np.ndarray, " B"],
    *,
    device: Device,
    consume: bool,
    dtype: Any,
    storage: Storage,
    prompt_capacity: int,
    new_capacity: int,
    own_capacity: int | None = None,
    note: Callable[[Cache], None],
) -> Generator[Array, None, tuple[Cache, Float[Array, "B V"]]]:
    """Read into a new cache or onto one, a layer between two stops, each of which gives what is there once it is read.

    As :meth:`kvjax.runtime.programs.Programs.fresh` and :meth:`kvjax.runtime.programs.Programs.onto`, with their
    results. A cache that is consumed goes layer by layer: ``note`` is told of what there is of it after each, with the
    counters of before, so that whoever lent it can have it back when a later layer fails.
    """
    policy = device.policy
    capacities = {"prompt_capacity": prompt_capacity, "new_capacity": new_capacity, "own_capacity": own_capacity}
    none = {"layers": (), "context": None, **_NO_CAPACITIES}
    counters = _counters(device, len(count)) if cache is None else cache.replace(**none)
    work = np.where(tokens[:, 0] < 0, 0, count)
    ids, count, work, total = put(device, (tokens, count, work, total))
    counts = counters.seen, count, work, total
    if cache is None:
        pages = device.pages(prompt_capacity, new_capacity, storage, own_capacity)
    else:
        pages = pages_onto(device.local_config, device.local(cache), **capacities)
        had = [layer.pages for layer in device.local(cache).layers]
    x = EMBED_PROMPT(device, params, ids)
    lasts: list[Any] = []
    done: list[Any] = []
    for i, (layer, own, (number, _)) in enumerate(
        zip(params.layers, pages, numbers_of_kind(policy, params), strict=True)
    ):
        sizes: dict[str, Any] = {"number": number, "pages": own}
        if cache is None:
            sizes |= {"dtype": jnp.dtype(dtype), "storage": storage}
            one, x, last = PREFILL_LAYER_FRESH(device.at(number), layer, x, counts, **sizes)
            done += one.layers
        else:
            one, donate = _layer_of(cache, i), consume and own == had[i]
            one, x, last = PREFILL_LAYER_ONTO(device.at(number), layer, one, x, counts, donate=donate, **sizes)
            done += one.layers
            if donate:
                note(cache.replace(layers=(*done, *cache.layers[i + 1 :])))
        lasts.append(last)
        if i >= _AHEAD:
            ready(lasts[i - _AHEAD])
        yield last
    counters, logits = PROMPT_LOGITS(device, params, counters, lasts[-1], count)
    if cache is not None:
        if consume:
            delete(cache)  # what is left of it
        capacities |= {"context": cache.context}
    return counters.replace(layers=tuple(done), **capacities), logits


def _counters(device: Device, rows: int) -> Cache:
    """The counters of an empty cache of this many rows, and none of its layers."""
    zero: Any = np.zeros((rows,), np.int32)
    none: Any = np.full((rows,), NO_TOKEN, np.int32)
    return put(device, Cache((), zero, zero, none, device.policy, 0, 0))


def _layer_of(cache: Cache, index: int) -> Cache:
    """A cache of one of its layers, which shares the others' counters."""
    context = cache.context
    if context is not None:
        context = dataclasses.replace(context, layers=context.layers[index : index + 1])
    return cache.replace(layers=cache.layers[index : index + 1], context=context, **_NO_CAPACITIES)
