"""A prompt read layer by layer, each layer by a program of its own, which layers of its kind share.

The numbers are those of the prefill of all layers in one program, which reads a prompt layer by layer too: a policy
that selects by attention over the entire prompt sees all of it, where pieces of the prompt would not do; so does one
that has the prompt repeated. Two things are gained: a program of one layer of thirty is compiled, and read back from
the compilation cache, in a small part of the time; and what else has to run may run between layers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache.cache import Cache
from kvjax.cache.quantisation import Storage
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.rope import angles_of_layers, prompt_positions
from kvjax.policies.base import Policy
from kvjax.runtime.alike_layers import numbers_of_kind
from kvjax.runtime.kvzip_prefill_by_layers import Fed, fed_first, new_cache, read_whole
from kvjax.runtime.prefill import after_reading
from kvjax.runtime.prefill_and_compress import compress_one, read_and_compress
from kvjax.runtime.signal_collector import signal_collector
from kvjax.runtime.single_layer_programs import (
    Begun,
    LayerInput,
    LayerwisePrompt,
    Reading,
    before_the_first,
    cache_of,
    embedded,
    logits_of_last,
    shared_layer,
    zeros_are_sent,
)
from kvjax.sharding.compile import ROW, Device, Program

#: What a layer gives: a cache of it alone with the counters after the prompt, what the next layer reads, of the prompt
#: and in every pass that repeats it, and the logits after each row's last token, which are zeros before the last layer.
LayerRead = tuple[Cache, Float[Array, "B T M"], Fed, Float[Array, "B V"]]


def prefill_layer_fresh(
    device: Device,
    ends: Decoder,
    layer: DecoderLayer,
    x: Float[Array, "B T M"],
    fed: Fed,
    read: LayerInput,
    *,
    number: int,
    pages: tuple[int, ...],
    dtype: Any,
    storage: Storage,
) -> LayerRead:
    """One layer of :func:`kvjax.runtime.prefill.prefill_fresh`; to the policy it is the layer of this number.

    Args:
      ends: the model without its layers. layer: this one.
      x: what it reads; of the first layer anything of that shape, since ``read`` has the tokens that it embeds.
      fed: the same of every pass.
    """
    cache = new_cache(device, number, read, pages, dtype, storage)
    return _read(device, ends, layer, cache, x, fed, read, number, cache.layers[0].pages, fresh=True)


def prefill_layer_onto(
    device: Device,
    ends: Decoder,
    layer: DecoderLayer,
    cache: Cache,
    x: Float[Array, "B T M"],
    fed: Fed,
    read: LayerInput,
    *,
    number: int,
    pages: tuple[int, ...],
) -> LayerRead:
    """One layer of :func:`kvjax.runtime.prefill.prefill_onto`, of a cache of this layer alone."""
    return _read(device, ends, layer, cache, x, fed, read, number, pages, fresh=False)


def _read(
    device: Device,
    ends: Decoder,
    layer: DecoderLayer,
    cache: Cache,
    x: Float[Array, "B T M"],
    fed: Fed,
    read: LayerInput,
    number: int,
    pages: tuple[int, ...],
    *,
    fresh: bool,
) -> LayerRead:
    policy, (seen, count, _, total), how = cache.policy, read.counts, {"pages": pages, "fresh": fresh}
    if fed is None:
        x = embedded(ends, read, x)
        (angles,) = angles_of_layers([layer.config], prompt_positions(seen, x.shape[1], fresh), seen + count)
        collector = signal_collector(policy, device.local_config, seen, count, total, x.shape[1], fresh)
        given = layer, cache.layers[0], x, angles, read.counts, jnp.int32(0), collector
        packed, x, _, _ = read_and_compress(policy, number, *given, shared_layer(cache, read.index), **how)
    else:
        whole, x, fed = read_whole(device, ends, layer, cache, x, fed, read, number, fresh=fresh)
        given = number, layer, whole.ordered, whole.k, whole.v, read.counts, whole.signals
        packed = compress_one(policy, *given, **how)
    return after_reading(cache.replace(layers=(packed,)), count), x, fed, logits_of_last(ends, read, x)


def _layer_types(device: Device, arguments: Any, static: dict[str, Any]) -> Any:
    """The results of :func:`prefill_layer_fresh`, by the types that say where they go."""
    given = {name: static[name] for name in ("pages", "dtype", "storage")}
    layer = jax.eval_shape(lambda: device.empty_layer(static["number"], 1, **given))
    return cache_of(device, layer, ROW), ROW, None, ROW


def _onto_types(device: Device, arguments: Any, static: dict[str, Any]) -> Any:
    return arguments[2], ROW, None, ROW


PREFILL_LAYER_FRESH = Program(prefill_layer_fresh, _layer_types, ("number", "pages", "dtype", "storage"), (2, 3))
PREFILL_LAYER_ONTO = Program(prefill_layer_onto, _onto_types, ("number", "pages"), (2, 3, 4))
#: The same of a cache that stays, or whose pages do not fit what it becomes.
PREFILL_LAYER_BESIDE = Program(prefill_layer_onto, _onto_types, ("number", "pages"), (3, 4))


def program_names(policy: Policy, params: Decoder, *, fresh: bool, onto: bool) -> list[str]:
    """Names of the programs of :func:`reading_by_layers`, into a new cache and onto one: one for each kind of layer."""
    kinds = len({number for number, _ in numbers_of_kind(policy, params)})
    shapes = 2 if policy.signals.repeat is not None else 1  # of a prompt, and of the passes that repeat it
    small = [] if zeros_are_sent() else ["hidden_states"] * shapes
    if policy.shares_layers:
        small += [] if zeros_are_sent() else ["empty_pool"]
        return small + ["hold_and_weigh_layer", "lay_out_layer"] * kinds * (fresh + onto)
    return small + ["prefill_layer_fresh"] * kinds * fresh + ["prefill_layer_onto"] * kinds * onto


def reading_by_layers(prompt: LayerwisePrompt) -> Reading:
    """Read into a new cache or onto one, a layer between two stops, each of which gives what is there once it is read.

    As :meth:`kvjax.runtime.programs.Programs.fresh` and :meth:`kvjax.runtime.programs.Programs.onto`, with their
    results.
    """
    device, cache = prompt.device, prompt.cache
    x, fed = before_the_first(device, prompt.read.tokens, prompt.params), fed_first(prompt, device.policy)
    begun = Begun(prompt.tokens, prompt.count, len(prompt.params.layers))
    done: list[Any] = []
    one = logits = None
    for i, (layer, number, before, read) in enumerate(prompt.layers(cache)):
        sizes: dict[str, Any] = {"number": number, "pages": prompt.pages[i]}
        if cache is None or before is None:
            sizes |= {"dtype": jnp.dtype(prompt.dtype), "storage": prompt.storage}
            one, x, fed, logits = PREFILL_LAYER_FRESH(device.at(number), prompt.ends, layer, x, fed, read, **sizes)
            done += one.layers
        else:
            donate = prompt.consume and prompt.fits[i]
            given = prompt.ends, layer, before, x, fed, read
            program = PREFILL_LAYER_ONTO if donate else PREFILL_LAYER_BESIDE
            one, x, fed, logits = program(device.at(number), *given, **sizes)
            done += one.layers
            if donate:
                prompt.note(cache.replace(layers=(*done, *cache.layers[i + 1 :])))
        yield begun.after(one.seen)
    assert one is not None and logits is not None  # a model has layers
    return prompt.done(one, done), logits
