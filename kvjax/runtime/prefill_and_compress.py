"""One layer of a prefill: read, then compressed by its policy; traced once for layers that are alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.attention import kept_tokens, shared_kept_tokens
from kvjax.cache.buckets import keys_of
from kvjax.cache.groups import parts
from kvjax.cache.shared_context import SharedLayer
from kvjax.model.decoder import DecoderLayer
from kvjax.model.rope import Angles
from kvjax.policies.base import Policy, PromptChunk
from kvjax.policies.signals import Mass, PromptSignals
from kvjax.policies.traced_checks import check_arrays, check_compressed
from kvjax.runtime.prefill_layer import read_rows, zero_after
from kvjax.runtime.signal_collector import SignalCollector
from pallas_kernels.kept_tokens import KeptTokens

#: Tokens of each row before a chunk, in it, those to compute, and of the whole prompt.
Counts = tuple[Int[Array, " B"], Int[Array, " B"], Int[Array, " B"], Int[Array, " B"]]


def read_and_compress(
    policy: Policy,
    index: int,
    layer: DecoderLayer,
    old: Any,
    x: Float[Array, "B T M"],
    angles: Angles,
    tokens: Counts,
    zero: Int[Array, ""],
    collector: SignalCollector | None,
    shared: SharedLayer,
    *,
    pages: tuple[int, ...],
    fresh: bool,
) -> tuple[Any, Float[Array, "B T M"], Int[Array, ""], PromptSignals | None]:
    """One layer of :func:`through_layers`: its cache, hidden states, a zero that is known after both, its signals."""
    old, x, k, v, signals = read_one(policy, index, layer, old, x, angles, tokens, zero, collector, shared, fresh=fresh)
    packed = compress_one(policy, index, layer, old, k, v, tokens, signals, pages=pages, fresh=fresh)
    return packed, x, zero_after(*jax.tree.leaves([part.kv for part in parts(packed)])), signals


def read_one(
    policy: Policy,
    index: int,
    layer: DecoderLayer,
    old: Any,
    x: Float[Array, "B T M"],
    angles: Angles,
    tokens: Counts,
    zero: Int[Array, ""],
    collector: SignalCollector | None,
    shared: SharedLayer,
    *,
    fresh: bool,
) -> tuple[Any, Float[Array, "B T M"], Float[Array, "B H T D"], Float[Array, "B H T D"], PromptSignals | None]:
    """One layer before its policy chooses: the slots kept before, in order; hidden states, keys, values, signals."""
    seen, _, work, _ = tokens
    own = layer.config  # the model's, or of the heads that this device has of the layer
    kept = None
    if not fresh:
        old, unsorted = policy.sort_slots(index, old, own), old
        check_arrays(policy, "sort_slots", unsorted, old)
        kept = kept_tokens(old, keys_of(x.shape[1]), seen if own.positional == "alibi" else None)
    asked = None
    if collector is not None and own.window is None:  # policies choose the tokens of global layers alone
        sink_logits = layer.sink_logits
        if sink_logits is not None:
            sink_logits = jnp.broadcast_to(sink_logits, (len(seen), *sink_logits.shape))
        asking = (policy, index) if policy.signals.hidden else None
        asked = dataclasses.replace(collector, config=own, sink_logits=sink_logits, asking=asking)
    before = shared_before(shared, old, x.shape[1], seen, own.positional == "alibi")
    x, k, v, signals = read_rows(layer, x, angles, kept, work, zero, asked, before)
    if policy.signals.outputs and own.window is None:
        signals = dataclasses.replace(signals or PromptSignals(), outputs=Mass(None, layer.output_norms(v)))
    return old, x, k, v, signals


def compress_one(
    policy: Policy,
    index: int,
    layer: DecoderLayer,
    old: Any,
    k: Float[Array, "B H T D"],
    v: Float[Array, "B H T D"],
    tokens: Counts,
    signals: PromptSignals | None,
    *,
    pages: tuple[int, ...],
    fresh: bool,
) -> Any:
    """A layer's cache once its policy has chosen."""
    seen, count, _, total = tokens
    chunk = PromptChunk(seen, count, total, pages=pages, config=layer.config, fresh=fresh, signals=signals)
    packed = policy.compress(index, old, k, v, chunk)
    check_compressed(policy, old, packed)
    return packed


#: The same, traced and lowered once for all layers that are alike; XLA inlines it: the program is what it was.
read_and_compress_once = jax.jit(read_and_compress, static_argnames=("policy", "index", "pages", "fresh"))


#: Both halves of it, of layers whose prompt is repeated in between.
read_once = jax.jit(read_one, static_argnames=("policy", "index", "fresh"))
compress_once = jax.jit(compress_one, static_argnames=("policy", "index", "pages", "fresh"))


def shared_before(
    shared: SharedLayer, cache: Any, tokens: int, seen: Int[Array, " B"], placed: bool
) -> tuple[KeptTokens, Int[Array, " B"]] | None:
    """The rows of a context that the batch shares, and the tokens of each row before the next; ``placed`` for ALiBi."""
    common = shared_kept_tokens(shared, cache, keys_of(tokens), placed)
    return None if common is None else (common, seen)
