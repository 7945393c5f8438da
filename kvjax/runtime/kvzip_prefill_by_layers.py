"""A prompt that is repeated (KVzip), layer by layer: each layer reads it, then takes all passes, then chooses.

The numbers are those of :func:`kvjax.runtime.kvzip_prefill.read_then_choose`, which is one program of all layers. A
pass attends in each layer to that layer's keys and values alone, so a layer needs of the others only what they made of
the passes before it: hidden states instead of the keys and values of all layers. On one device alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.cache import Cache
from kvjax.cache.quantisation import Storage
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.rope import angles_of_layers, prompt_positions
from kvjax.policies.base import Policy
from kvjax.policies.signals import PromptSignals
from kvjax.runtime.kvzip_passes import Passes
from kvjax.runtime.kvzip_prefill import hold, pass_through, with_repeated
from kvjax.runtime.prefill_and_compress import read_one
from kvjax.runtime.signal_collector import signal_collector
from kvjax.runtime.single_layer_programs import (
    LayerInput,
    LayerwisePrompt,
    before_the_first,
    cache_of,
    embedded,
    layer_of,
    own_layer,
    shared_layer,
)
from kvjax.sharding.compile import Device

#: The inputs of a layer in every pass, [passes, B, W, M]; None of a policy that has nothing repeated.
Fed = Array | None


class Whole(NamedTuple):
    """A layer that has read a prompt, and repeated it where its policy asks for that.

    Attributes:
      ordered: its slots before the prompt, in the policy's order.
      k, v: of the prompt. signals: what the policy asked for.
    """

    ordered: Any
    k: Float[Array, "B H T D"]
    v: Float[Array, "B H T D"]
    signals: PromptSignals | None


def read_whole(
    device: Device,
    ends: Decoder,
    layer: DecoderLayer,
    cache: Cache,
    x: Float[Array, "B T M"],
    fed: Fed,
    read: LayerInput,
    number: int,
    *,
    fresh: bool,
) -> tuple[Whole, Float[Array, "B T M"], Fed]:
    """Read a prompt in one layer and keep all of it; and what the next layer reads, of the prompt and in every pass.

    ``cache``: of what came before, see :func:`layer_of`; ``fresh`` if that is nothing.
    """
    policy, (seen, count, work, total) = device.local_policy, read.counts
    old, shared = own_layer(cache, read.index), shared_layer(cache, read.index)
    x = embedded(ends, read, x)
    (angles,) = angles_of_layers([layer.config], prompt_positions(seen, x.shape[1], fresh), seen + count)
    collector = signal_collector(policy, device.local_config, seen, count, total, x.shape[1], fresh)
    given = layer, old, x, angles, read.counts, jnp.int32(0), collector, shared
    ordered, x, k, v, signals = read_one(policy, number, *given, fresh=fresh)
    asked = policy.signals.repeat
    if asked is None or fed is None:
        return Whole(ordered, k, v, signals), x, None
    passes, end = Passes(asked, read.tokens, seen, work), seen + work
    held = hold(ordered, k, v, seen, count, fresh=fresh, placed=layer.config.positional == "alibi")
    (rope,) = angles_of_layers([layer.config], end[:, None] + jnp.arange(passes.width), end)

    def once(i: Int[Array, ""], carried: tuple[Array, Array | None]) -> tuple[Array, Array | None]:
        fed, peak = carried
        ids, tokens, chunk = passes.of(i)
        y = embedded(ends, read._replace(tokens=ids), jax.lax.dynamic_index_in_dim(fed, i, keepdims=False))
        y, peak = pass_through(layer, held, rope, shared, peak, passes, i, tokens, chunk, y)
        return jax.lax.dynamic_update_index_in_dim(fed, y, i, 0), peak

    fed, peak = jax.lax.fori_loop(0, passes.number, once, (fed, passes.empty_peak(layer, k)))
    found = with_repeated(signals, None if peak is None else peak[..., : read.tokens.shape[1]])
    return Whole(ordered, k, v, found), x, fed


def new_cache(
    device: Device, number: int, read: LayerInput, pages: tuple[int, ...], dtype: Any, storage: Storage
) -> Cache:
    """An empty cache of one layer, as :func:`layer_of` gives it."""
    seen = read.counts[0]
    cache = cache_of(device, device.empty_layer(number, len(seen), pages, dtype, storage), seen)
    return layer_of(cache, number) if cache.shares_layers else cache


def fed_first(prompt: LayerwisePrompt, policy: Policy) -> Fed:
    """Arrays for the first layer's input of every pass, as :func:`before_the_first` gives one of a prompt."""
    if policy.signals.repeat is None:
        return None
    sizes = Passes(policy.signals.repeat, prompt.read.tokens, *prompt.read.counts[:2])
    shape = sizes.most, len(prompt.count), sizes.width
    return before_the_first(prompt.device, np.zeros(shape, np.int32), prompt.params)
