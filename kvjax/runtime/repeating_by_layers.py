"""A prompt that is repeated (KVzip), layer by layer: each layer reads it, then each pass goes through the layers.

The numbers are those of :func:`kvjax.runtime.repeating.read_then_choose`, which is one program of all layers. Here two
programs serve every layer of a kind: one reads the prompt and leaves its keys and values whole, one takes a pass
through a layer, and in the last pass lets the policy choose. On one device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.cache import Cache
from kvjax.cache.quantisation import Storage
from kvjax.model.decoder import Decoder, DecoderLayer, without_layers
from kvjax.model.rope import angles_of_layers
from kvjax.policies.base import Policy
from kvjax.policies.signals import PromptSignals, Repetition
from kvjax.runtime.alike import numbers_of_kind
from kvjax.runtime.layer_step import compress_one, read_one
from kvjax.runtime.prefill import after_reading
from kvjax.runtime.repeating import hold, pass_through, with_repeated
from kvjax.runtime.repetition import Passes
from kvjax.runtime.signal_collector import signal_collector
from kvjax.runtime.single_layers import (
    Begun,
    LayerInput,
    before_the_first,
    begun_reading,
    cache_of,
    embedded,
    joined,
    layer_of,
    logits_of_last,
)
from kvjax.sharding.compile import Device, Program, put

#: A layer's keys, its values, and what its policy asked for of them; then each key's largest probability in the passes.
Whole = tuple[Array, Array, PromptSignals | None]
Peak = Array | None


class Pass(NamedTuple):
    """A pass: its number, and whether it is the last."""

    number: Any
    final: Any


def hold_layer(
    device: Device,
    ends: Decoder,
    layer: DecoderLayer,
    cache: Cache | None,
    x: Float[Array, "B T M"],
    read: LayerInput,
    *,
    number: int,
) -> tuple[tuple[Whole, Peak], Float[Array, "B T M"], Float[Array, "B V"]]:
    """Read a prompt in one layer and keep all of it: onto ``cache``, of this layer alone, or onto nothing."""
    policy, (seen, count, work, total) = device.local_policy, read.counts
    x = embedded(ends, read, x)
    (angles,) = angles_of_layers([layer.config], seen[:, None] + jnp.arange(x.shape[1]), seen + count)
    collector = signal_collector(policy, device.local_config, seen, count, total, x.shape[1], cache is None)
    old, shared = (None, (None,)) if cache is None else (cache.layers[0], cache.shared_layers[0])
    given = layer, old, x, angles, read.counts, jnp.int32(0), collector, shared
    _, x, k, v, signals = read_one(policy, number, *given, fresh=cache is None)
    peak = Passes(asked(policy), read.tokens, seen, work).empty_peak(layer, k)
    return ((k, v, signals), peak), x, logits_of_last(ends, read, x)


def repeat_layer(
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
) -> tuple[Cache, Float[Array, "B W M"], Peak]:
    """A pass through one layer that holds a prompt; in the final one its cache becomes what the policy chooses."""
    policy, (k, v, signals), fresh = device.local_policy, whole, cache is None
    seen, count, work, _ = read.counts
    if cache is None:
        cache = cache_of(device, device.empty_layer(number, len(count), pages, dtype, storage), seen)
    passes = Passes(asked(policy), read.tokens, seen, work)
    ids, fed, chunk = passes.of(this.number)
    x = embedded(ends, read._replace(tokens=ids), x)
    old, alibi, end = cache.layers[0], layer.config.positional == "alibi", seen + work
    ordered = old if fresh else policy.sort_slots(number, old, layer.config)
    held = hold(ordered, k, v, seen, count, fresh=fresh, placed=alibi)
    (angles,) = angles_of_layers([layer.config], end[:, None] + jnp.arange(passes.width), end)
    given = layer, held, angles, cache.shared_layers[0], peak, passes
    x, peak = pass_through(*given, this.number, fed, chunk, x)
    found = with_repeated(signals, None if peak is None else peak[..., : read.tokens.shape[1]])

    def choose() -> Any:
        return compress_one(policy, number, layer, ordered, k, v, read.counts, found, pages=pages, fresh=fresh)

    def stay() -> Any:
        wanted = jax.eval_shape(choose)
        if _types(wanted) == _types(old):
            return old
        return jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), wanted)  # nobody reads them

    packed = jax.lax.cond(this.final, choose, stay)
    return after_reading(cache.replace(layers=(packed,)), count), x, peak


def _types(tree: Any) -> Any:
    return jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def asked(policy: Policy) -> Repetition:
    """How prompts are repeated under a policy that has them repeated."""
    found = policy.signals.repeat
    assert found is not None
    return found


HOLD_LAYER = Program(hold_layer, None, ("number",), (3,))
REPEAT_LAYER = Program(repeat_layer, None, ("number", "pages", "dtype", "storage"), (2, 3, 4))


def repeating_by_layers(
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
    """:func:`kvjax.runtime.by_layers.reading_by_layers` of prompts that are repeated."""
    capacities = {"prompt_capacity": prompt_capacity, "new_capacity": new_capacity, "own_capacity": own_capacity}
    read, pages, had = begun_reading(device, cache, tokens, count, total, storage, capacities)
    ends, last = without_layers(params), len(params.layers) - 1
    numbers = [number for number, _ in numbers_of_kind(device.policy, params)]
    x, logits = before_the_first(device, read.tokens, params), None
    passes = Passes(asked(device.policy), read.tokens, *read.counts[:2])
    last_pass = max(0, (int(np.where(tokens[:, 0] < 0, 0, count).max()) - 1) // passes.size)
    begun = Begun(tokens, count, len(params.layers) * (tokens.shape[1] + (last_pass + 1) * passes.width))
    held: list[Any] = []
    for i, layer in enumerate(params.layers):
        before = None if cache is None else layer_of(cache, i)
        given = ends, layer, before, x, read.at(i, last)
        one, x, logits = HOLD_LAYER(device, *given, number=numbers[i])
        held.append(one)
        yield begun.after(one[0][0], tokens.shape[1])
    fed: Any = put(device, np.zeros((len(count), passes.width), np.int32))
    x = before_the_first(device, fed, params)
    layers: list[Any] = [None] * len(held) if cache is None else list(cache.layers)
    one = None
    for number in range(last_pass + 1):
        final = number == last_pass
        for i, layer in enumerate(params.layers):
            whole, peak = held[i]
            sizes: dict[str, Any] = {"number": numbers[i], "pages": pages[i]}
            sizes |= {"dtype": jnp.dtype(dtype), "storage": storage}
            before = None if cache is None else layer_of(cache.replace(layers=tuple(layers)), i)
            donate = cache is None or (consume and pages[i] == had[i])
            given = ends, layer, before, x, peak, whole, read.at(i, last), Pass(np.int32(number), np.bool_(final))
            one, x, peak = REPEAT_LAYER(device, *given, donate=donate, **sizes)
            held[i] = None if final else (whole, peak)
            if final or (donate and cache is not None):
                (layers[i],) = one.layers
            if donate and cache is not None:
                note(cache.replace(layers=tuple(layers)))
            yield begun.after(one.seen, passes.width)
    assert one is not None and logits is not None  # a model has layers
    return joined(one, layers, cache, consume, capacities), logits
