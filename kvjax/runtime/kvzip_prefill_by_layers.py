"""A prompt that is repeated (KVzip), layer by layer: each layer reads it, then each pass goes through the layers.

The numbers are those of :func:`kvjax.runtime.kvzip_prefill.read_then_choose`, which is one program of all layers. Here
two programs serve every layer of a kind: one reads the prompt and leaves its keys and values whole, one takes a pass
through a layer, and in the last pass lets the policy choose. On one device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache.cache import Cache
from kvjax.cache.quantisation import Storage
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.rope import angles_of_layers, prompt_positions
from kvjax.policies.base import Policy
from kvjax.policies.signals import PromptSignals, Repetition
from kvjax.policies.traced_checks import check_arrays
from kvjax.runtime.kvzip_passes import Passes
from kvjax.runtime.kvzip_prefill import hold, pass_through, with_repeated
from kvjax.runtime.prefill import after_reading
from kvjax.runtime.prefill_and_compress import compress_one, read_one
from kvjax.runtime.signal_collector import signal_collector
from kvjax.runtime.single_layer_programs import (
    Begun,
    LayerInput,
    LayerwisePrompt,
    Reading,
    before_the_first,
    cache_of,
    embedded,
    layer_of,
    logits_of_last,
    own_layer,
    work_of,
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
    """Read a prompt in one layer and keep all of it: onto ``cache``, see :func:`layer_of`, or onto nothing."""
    policy, (seen, count, work, total) = device.local_policy, read.counts
    x = embedded(ends, read, x)
    (angles,) = angles_of_layers([layer.config], prompt_positions(seen, x.shape[1], cache is None), seen + count)
    collector = signal_collector(policy, device.local_config, seen, count, total, x.shape[1], cache is None)
    old, shared = (None, (None,)) if cache is None else (own_layer(cache, read.index), cache.shared_layers[0])
    given = layer, old, x, angles, read.counts, jnp.int32(0), collector, shared
    _, x, k, v, signals = read_one(policy, number, *given, fresh=cache is None)
    repeat = policy.signals.repeat
    peak = None if repeat is None else Passes(repeat, read.tokens, seen, work).empty_peak(layer, k)
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
    policy, (k, v, _), fresh = device.local_policy, whole, cache is None
    if cache is None:
        cache = new_cache(device, number, read, pages, dtype, storage)
    once = repeat_once(policy, ends, layer, cache, x, peak, whole, read, this, number=number, fresh=fresh)

    def choose() -> Any:
        given = number, layer, once.ordered, k, v, read.counts, once.signals
        return compress_one(policy, *given, pages=pages, fresh=fresh)

    packed = jax.lax.cond(this.final, choose, lambda: unread(choose, cache.layers[0]))
    return after_reading(cache.replace(layers=(packed,)), read.counts[1]), once.x, once.peak


class Repeated(NamedTuple):
    """A layer after a pass: what the next reads, its keys' peak, its slots in order, and what its policy asked for."""

    x: Float[Array, "B W M"]
    peak: Peak
    ordered: Any
    signals: PromptSignals | None


def repeat_once(
    policy: Policy,
    ends: Decoder,
    layer: DecoderLayer,
    cache: Cache,
    x: Float[Array, "B W M"],
    peak: Float[Array, "B H S"] | None,
    whole: Whole,
    read: LayerInput,
    this: Pass,
    *,
    number: int,
    fresh: bool,
) -> Repeated:
    """A pass through one layer that holds a prompt; ``cache`` is what :func:`layer_of` gives of it."""
    (k, v, signals), (seen, count, work, _) = whole, read.counts
    passes = Passes(asked(policy), read.tokens, seen, work)
    ids, fed, chunk = passes.of(this.number)
    x = embedded(ends, read._replace(tokens=ids), x)
    old, alibi, end = own_layer(cache, read.index), layer.config.positional == "alibi", seen + work
    ordered = old if fresh else policy.sort_slots(number, old, layer.config)
    check_arrays(policy, "sort_slots", old, ordered)
    held = hold(ordered, k, v, seen, count, fresh=fresh, placed=alibi)
    (angles,) = angles_of_layers([layer.config], end[:, None] + jnp.arange(passes.width), end)
    given = layer, held, angles, cache.shared_layers[0], peak, passes
    x, peak = pass_through(*given, this.number, fed, chunk, x)
    found = with_repeated(signals, None if peak is None else peak[..., : read.tokens.shape[1]])
    return Repeated(x, peak, ordered, found)


def new_cache(
    device: Device, number: int, read: LayerInput, pages: tuple[int, ...], dtype: Any, storage: Storage
) -> Cache:
    """An empty cache of one layer, as :func:`layer_of` gives it."""
    seen = read.counts[0]
    cache = cache_of(device, device.empty_layer(number, len(seen), pages, dtype, storage), seen)
    return layer_of(cache, number) if cache.shares_layers else cache


def unread(choose: Callable[[], Any], instead: Any = None) -> Any:
    """A stand-in for ``choose()`` where nobody reads it: ``instead`` if it is of its types, else zeros."""
    wanted = jax.eval_shape(choose)
    if _types(wanted) == _types(instead):
        return instead
    return jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), wanted)


def _types(tree: Any) -> Any:
    return jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def asked(policy: Policy) -> Repetition:
    """How prompts are repeated under a policy that has them repeated."""
    found = policy.signals.repeat
    assert found is not None
    return found


HOLD_LAYER = Program(hold_layer, None, ("number",), (3,))
REPEAT_LAYER = Program(repeat_layer, None, ("number", "pages", "dtype", "storage"), (2, 3, 4))


def holding(prompt: LayerwisePrompt) -> Generator[Array, None, tuple[list[Any], Array, list[Pass], Begun, Array]]:
    """Read a prompt in all layers, which keep all of it.

    Returns:
      What each holds, an array for the first input of a pass, the passes to take, what was begun, and the logits.
    """
    device, read, width = prompt.device, prompt.read, prompt.tokens.shape[1]
    x, logits = before_the_first(device, read.tokens, prompt.params), None
    sizes = Passes(asked(device.policy), read.tokens, *read.counts[:2])
    final = max(0, (int(work_of(prompt.tokens, prompt.count).max()) - 1) // sizes.size)
    passes = [Pass(np.int32(number), np.bool_(number == final)) for number in range(final + 1)]
    work = len(prompt.params.layers) * (width + len(passes) * sizes.width)
    begun = Begun(prompt.tokens, prompt.count, work)
    held: list[Any] = []
    for layer, number, before, told in prompt.layers(prompt.cache):
        one, x, logits = HOLD_LAYER(device, prompt.ends, layer, before, x, told, number=number)
        held.append(one)
        yield begun.after(one[0][0], width)
    assert logits is not None  # a model has layers
    fed: Any = put(device, np.zeros((len(prompt.count), sizes.width), np.int32))
    return held, before_the_first(device, fed, prompt.params), passes, begun, logits


def repeating_by_layers(prompt: LayerwisePrompt) -> Reading:
    """:func:`kvjax.runtime.prefill_by_layers.reading_by_layers` of prompts that are repeated."""
    cache = prompt.cache
    held, x, passes, begun, logits = yield from holding(prompt)
    layers: list[Any] = [None] * len(held) if cache is None else list(cache.layers)
    one = None
    for this in passes:
        final = bool(this.final)
        now = None if cache is None else cache.replace(layers=tuple(layers))
        for i, (layer, number, before, read) in enumerate(prompt.layers(now)):
            whole, peak = held[i]
            sizes: dict[str, Any] = {"number": number, "pages": prompt.pages[i]}
            sizes |= {"dtype": jnp.dtype(prompt.dtype), "storage": prompt.storage}
            donate = cache is None or (prompt.consume and prompt.fits[i])
            given = prompt.ends, layer, before, x, peak, whole, read, this
            one, x, peak = REPEAT_LAYER(prompt.device, *given, donate=donate, **sizes)
            held[i] = None if final else (whole, peak)
            if final or (donate and cache is not None):
                (layers[i],) = one.layers
            if donate and cache is not None:
                prompt.note(cache.replace(layers=tuple(layers)))
            yield begun.after(one.seen, x.shape[1])
    assert one is not None  # a model has layers
    return prompt.done(one, layers), logits
