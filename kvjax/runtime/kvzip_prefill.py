"""Reads prompts whose tokens are chosen when all layers have read them.

A prompt that is repeated (KVzip, arXiv 2505.23416): the keys and values of all layers stay whole, and the model is
asked to repeat the prompt, chunk by chunk, in one loop: each pass attends to the whole prompt, and hands over what
every key gets. Only then does the policy choose in each layer. The passes write nowhere but to their own keys and
values, which end with them.

A policy whose layers share their slots, repeated or not, chooses in all layers together: ``choice_of_all_layers.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.attention import kept_tokens
from kvjax.cache.buckets import keys_of
from kvjax.cache.cache import Cache
from kvjax.cache.shared_context import SharedLayer
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.rope import Angles, angles_of_layers, prompt_positions
from kvjax.policies.signals import Mass, PromptSignals
from kvjax.runtime.alike_layers import numbers_of_kind
from kvjax.runtime.choice_of_all_layers import compress_together
from kvjax.runtime.kvzip_passes import Passes
from kvjax.runtime.prefill_and_compress import compress_once, compress_one, read_once, read_one, shared_before
from kvjax.runtime.prefill_layer import read_rows
from kvjax.runtime.signal_collector import SignalCollector
from pallas_kernels.kept_tokens import KeptTokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """One layer's keys and values while its prompt is repeated.

    Attributes:
      cache: what the policy kept before, its slots in order. k, v: of the prompt.
      rows: both together, of each head without gaps.
    """

    cache: Any
    k: Float[Array, "B H T D"]
    v: Float[Array, "B H T D"]
    rows: KeptTokens


def hold(
    cache: Any,
    k: Float[Array, "B H T D"],
    v: Float[Array, "B H T D"],
    seen: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    fresh: bool,
    placed: bool,
) -> Held:
    """A layer that has read ``count`` tokens after ``seen``; ``placed`` where attention goes by positions (ALiBi)."""
    tokens, heads = k.shape[2], k.shape[1]
    block = keys_of(tokens)
    count = jnp.broadcast_to(count[:, None], (len(count), heads))
    # Positions are counted from the first token of the repetition, which follows the prompt.
    place = (jnp.arange(tokens) - count[..., None]) if placed else None
    if fresh:
        return Held(cache, k, v, KeptTokens(k, v, count, None, place, block))
    old = kept_tokens(cache, block, seen if placed else None)
    capacity = old.k.shape[2]
    order = jnp.arange(-(-(capacity + tokens) // block) * block)
    source = jnp.where(order < old.length[..., None], order, capacity + order - old.length[..., None])
    source = jnp.minimum(source, capacity + tokens - 1)

    def join(before: Array, new: Array) -> Array:
        both = jnp.concatenate([before, new.astype(before.dtype)], axis=2)
        return jnp.take_along_axis(both, source.reshape(*source.shape, *(1,) * (both.ndim - 3)), axis=2)

    places = None
    if place is not None and old.position is not None:
        places = join(old.position - count[..., None], place)
    return Held(
        cache, k, v, KeptTokens(join(old.k, k), join(old.v, v), old.length + count, old.log_mass, places, block)
    )


def read_then_choose(
    params: Decoder,
    cache: Cache,
    tokens: Int[Array, "B T"],
    x: Float[Array, "B T M"],
    seen: Int[Array, " B"],
    count: Int[Array, " B"],
    total: Int[Array, " B"],
    pages: tuple[tuple[int, ...], ...],
    *,
    fresh: bool,
    collector: SignalCollector | None,
    work: Int[Array, " B"],
) -> tuple[tuple[Any, ...], Float[Array, "B T M"]]:
    """:func:`through_layers` of a policy that chooses at the end; of prompts repeated see ``kvzip_passes.py``."""
    policy, caches = cache.policy, cache.by_layer()
    asked = policy.signals.repeat
    chunk, zero = (seen, count, work, total), jnp.int32(0)
    place = prompt_positions(seen, x.shape[1], fresh)
    angles = angles_of_layers([layer.config for layer in params.layers], place, seen + count)
    numbers = numbers_of_kind(policy, params)
    held: list[Held] = []
    found: list[PromptSignals | None] = []
    shared = cache.shared_layers
    for i, (layer, old) in enumerate(zip(params.layers, caches, strict=True)):
        number, alike = numbers[i]
        read = read_once if alike else read_one
        old, x, k, v, signals = read(
            policy, number, layer, old, x, angles[i], chunk, zero, collector, shared[i], fresh=fresh
        )
        held.append(hold(old, k, v, seen, count, fresh=fresh, placed=layer.config.positional == "alibi"))
        found.append(signals)
    if asked is not None:
        peaks = repeated(params, Passes(asked, tokens, seen, work), held, shared)
        found = [with_repeated(signals, peak) for signals, peak in zip(found, peaks, strict=True)]
    if policy.shares_layers:
        layers = [layer.config for layer in params.layers], [number for number, _ in numbers]
        dense = [(one.k, one.v) for one in held]
        given = cache.layers[0], [one.cache for one in held], dense, found, chunk, pages[0]
        return (compress_together(policy, *layers, *given, fresh=fresh),), x
    packed = []
    for i, (layer, one, signals) in enumerate(zip(params.layers, held, found, strict=True)):
        number, alike = numbers[i]
        compress = compress_once if alike else compress_one
        packed.append(
            compress(policy, number, layer, one.cache, one.k, one.v, chunk, signals, pages=pages[i], fresh=fresh)
        )
    return tuple(packed), x


def repeated(
    params: Decoder, passes: Passes, held: Sequence[Held], shared: Sequence[SharedLayer]
) -> list[Float[Array, "B H T"] | None]:
    """Each prompt key's largest attention probability in the passes, by layer; None for layers with a window."""
    tokens, end = passes.prompts.shape[1], passes.seen + passes.count
    place = end[:, None] + jnp.arange(passes.width)
    angles = angles_of_layers([layer.config for layer in params.layers], place, end)

    def once(i: Int[Array, ""], peaks: list[Array | None]) -> list[Array | None]:
        ids, fed, chunk = passes.of(i)
        x, done = params.embed(ids), []
        for layer, one, rope, common, peak in zip(params.layers, held, angles, shared, peaks, strict=True):
            x, peak = pass_through(layer, one, rope, common, peak, passes, i, fed, chunk, x)
            done.append(peak)
        return done

    peaks = [passes.empty_peak(layer, one.k) for layer, one in zip(params.layers, held, strict=True)]
    peaks = jax.lax.fori_loop(0, passes.number, once, peaks)
    return [None if peak is None else peak[..., :tokens] for peak in peaks]


def pass_through(
    layer: DecoderLayer,
    held: Held,
    rope: Angles,
    shared: SharedLayer,
    peak: Float[Array, "B H S"] | None,
    passes: Passes,
    i: Int[Array, ""],
    fed: Int[Array, " B"],
    chunk: Int[Array, " B"],
    x: Float[Array, "B W M"],
) -> tuple[Float[Array, "B W M"], Float[Array, "B H S"] | None]:
    """Pass ``i`` through one layer: what the next one reads, and ``peak`` with what the keys of its chunk got.

    ``fed`` tokens of each row are fed, of which ``chunk`` are the chunk's.
    """
    observer = None if peak is None else passes.collector(i, held.rows, fed, chunk, layer)
    end = passes.seen + passes.count
    before = shared_before(shared, held.cache, passes.width, end, layer.config.positional == "alibi")
    x, _, _, found = read_rows(layer, x, rope, held.rows, fed, jnp.int32(0), observer, before)
    if peak is not None:
        peak = jax.lax.dynamic_update_slice_in_dim(peak, found, i * passes.size, axis=2)
    return x, peak


def with_repeated(signals: PromptSignals | None, peak: Float[Array, "B H T"] | None) -> PromptSignals | None:
    """The signals that a layer's policy asked for, with the attention each key got in the passes."""
    if peak is None:
        return signals
    return dataclasses.replace(signals or PromptSignals(), repeat=Mass(None, peak[:, :, None]))
