"""Prefill: a prompt, a chunk of one, or a later turn becomes a compressed cache, layer by layer and block by block.

A layer's keys and values exist whole only while that layer runs: queries go through it in blocks, each against the
blocks before it (and the slots kept from earlier turns), then the policy packs what it keeps and the rest is dead.
Nothing of size T x T is ever made. Rows are padded on the right and go through a layer a few at a time; a block in
which these have ended is skipped, so time follows the prompts and not their buckets.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.attention import kept_rows, shared_rows
from kvjax.cache.buckets import block_of, keys_of, rows_together
from kvjax.cache.cache import NO_TOKEN, Cache
from kvjax.cache.groups import parts, rounded
from kvjax.cache.quantisation import Storage
from kvjax.cache.shared_context import SharedContext, SharedLayer
from kvjax.model.alibi import query_bias
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder, DecoderLayer
from kvjax.model.rope import Angles, angles_of_layers, apply_rope
from kvjax.policies.base import Policy, PromptChunk, page_capacities
from kvjax.policies.empty_cache import empty_cache
from kvjax.policies.full import Full
from kvjax.policies.signals import PromptSignals
from kvjax.runtime.alike import numbers_of_kind
from kvjax.runtime.layer_observer import LayerObserver
from kvjax.runtime.signal_collector import SignalCollector, signal_collector
from kvjax.sharding.compile import Device
from pallas_kernels.prefill import prefill
from pallas_kernels.rows import Rows

Pages = tuple[tuple[int, ...], ...]


def read_layer(
    layer: DecoderLayer,
    x: Float[Array, "B T M"],
    rope: Angles,
    kept: Rows | None,
    blocks: Int[Array, ""],
    zero: Int[Array, ""],
    collector: LayerObserver | None = None,
    count: Int[Array, " B"] | None = None,
    shared: tuple[Rows, Int[Array, " B"]] | None = None,
) -> tuple[Float[Array, "B T M"], Float[Array, "B H T D"], Float[Array, "B H T D"], Any]:
    """One layer over the whole prompt in query blocks: hidden states out, its keys and values as cached, and what
    ``collector`` observed. ``count``, the tokens of each row, saves accelerators the work on padding. ``shared`` are
    rows of a context that all rows of the batch attend to, and the tokens before these of each.
    """
    config = layer.config
    batch, tokens, _ = x.shape
    heads, group, dim = config.num_kv_heads, config.group_size, config.head_dim
    block = block_of(tokens)
    scale = config.attention_scale
    taken = None if collector is None else collector.before_layer(layer, x, rope)

    def body(i: Int[Array, ""], carry: tuple[Array, Array, Array, Any]) -> tuple[Any, ...]:
        x, k, v, partial = carry
        xb, here = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, i * block, block, axis=1), (x, rope))
        raw, kb, vb = layer.project(xb)
        kb, q = apply_rope(kb, here), apply_rope(raw, here)
        k = jax.lax.dynamic_update_slice_in_dim(k, kb.swapaxes(1, 2).astype(k.dtype), i * block, axis=2)
        v = jax.lax.dynamic_update_slice_in_dim(v, vb.swapaxes(1, 2).astype(v.dtype), i * block, axis=2)
        q, start = q.transpose(0, 2, 3, 1, 4), i * block
        linear = query_bias(config, jnp.tile(start + jnp.arange(block), group)[None])
        length = None if count is None else jnp.clip(count - start, 0, block)
        context: dict[str, Any] = {}
        if shared is not None:
            place = (shared[1][:, None] + start + jnp.arange(block)).reshape(1, -1)
            context = {"shared": shared[0], "shared_bias": query_bias(config, jnp.tile(place, (1, group)))}
        where: dict[str, Any] = {"offset": start, "length": length, "block": keys_of(block)}
        where |= {"scale": scale, "window": config.window, "soft_cap": config.attention_soft_cap}
        found = prefill(q, k, v, kept=kept, bias=linear, **where, **context)
        if collector is not None and partial is not None:
            partial = collector.after_block(partial, raw, q, found.lse, k, kept, i)
        attended = found.out.transpose(0, 3, 1, 2, 4)
        xb = layer.finish(xb, attended.astype(x.dtype))
        return jax.lax.dynamic_update_slice_in_dim(x, xb, i * block, axis=1), k, v, partial

    empty = jnp.broadcast_to(zero.astype(x.dtype), (batch, heads, tokens, dim))
    partial = None if collector is None else collector.start(kept, tokens)
    x, k, v, partial = jax.lax.fori_loop(0, blocks, body, (x, empty, empty, partial))
    return x, k, v, None if collector is None else collector.finish(partial, taken, k, kept, block)


def read_rows(
    layer: DecoderLayer,
    x: Float[Array, "B T M"],
    rope: Angles,
    kept: Rows | None,
    count: Int[Array, " B"],
    zero: Int[Array, ""],
    collector: LayerObserver | None = None,
    shared: tuple[Rows, Int[Array, " B"]] | None = None,
) -> tuple[Float[Array, "B T M"], Float[Array, "B H T D"], Float[Array, "B H T D"], Any]:
    """:func:`read_layer` over ``count`` tokens of each row, a few rows at a time (:func:`rows_together`).

    A row of no tokens costs nothing, and its hidden states stay as they are.
    """
    common, before = (None, None) if shared is None else shared
    batch, tokens, _ = x.shape
    block = block_of(tokens)
    together = rows_together(batch, block)

    def read(given: tuple[Any, ...]) -> tuple[Any, ...]:
        x, rope, kept, count, collector, before = given
        blocks = (jnp.max(count) + block - 1) // block
        shared = None if common is None else (common, before)
        return read_layer(layer, x, rope, kept, blocks, zero, collector, count, shared)

    given = (x, rope, kept, count, collector, before)
    if together == batch:
        return read(given)

    def cut(i: Int[Array, ""], tree: Any) -> Any:
        return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, i * together, together), tree)

    def body(i: Int[Array, ""], done: tuple[Any, ...]) -> tuple[Any, ...]:
        made = read(cut(i, (done[0], *given[1:])))
        return jax.tree.map(lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, i * together, axis=0), done, made)

    shapes = jax.eval_shape(read, cut(zero, given))
    empty = [jnp.broadcast_to(zero.astype(a.dtype), (batch, *a.shape[1:])) for a in jax.tree.leaves(shapes[1:])]
    done = (x, *jax.tree.unflatten(jax.tree.structure(shapes[1:]), empty))
    return jax.lax.fori_loop(0, batch // together, body, done)


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
    angles = angles_of_layers(configs, seen[:, None] + jnp.arange(x.shape[1]), seen + count)
    done: list[Any] = []
    signals = None
    zero = jnp.int32(0) if first == 0 else zero_after(x)
    chunk = (seen, count, count if work is None else work, total)
    numbers = numbers_of_kind(policy, params)
    for i, (old, counts) in enumerate(zip(caches, pages, strict=True), first):
        number, alike = numbers[i]
        read = _read_and_compress_once if alike else _read_and_compress
        shared = (None,) * len(parts(old)) if context is None else context.layers[i]
        given = params.layers[i], old, x, angles[i - first], chunk, zero, collector, shared
        packed, x, zero, signals = read(policy, number, *given, pages=counts, fresh=fresh)
        done.append(packed)
    return tuple(done), x, signals


def _read_and_compress(
    policy: Policy,
    index: int,
    layer: DecoderLayer,
    old: Any,
    x: Float[Array, "B T M"],
    angles: Angles,
    tokens: tuple[Int[Array, " B"], Int[Array, " B"], Int[Array, " B"], Int[Array, " B"]],
    zero: Int[Array, ""],
    collector: SignalCollector | None,
    shared: SharedLayer,
    *,
    pages: tuple[int, ...],
    fresh: bool,
) -> tuple[Any, Float[Array, "B T M"], Int[Array, ""], PromptSignals | None]:
    """One layer of :func:`through_layers`: its cache, hidden states, a zero that is known after both, its signals."""
    seen, count, work, total = tokens
    own = layer.config  # the model's, or of the heads that this device has of the layer
    kept = None
    if not fresh:
        old = policy.sort_slots(index, old, own)
        kept = kept_rows(old, keys_of(block_of(x.shape[1])), seen if own.positional == "alibi" else None)
    asked = None
    if collector is not None and own.window is None:  # policies choose the tokens of global layers alone
        asked = dataclasses.replace(collector, config=own)
    common = shared_rows(shared, old, keys_of(block_of(x.shape[1])), own.positional == "alibi")
    before = None if common is None else (common, seen)
    x, k, v, signals = read_rows(layer, x, angles, kept, work, zero, asked, before)
    chunk = PromptChunk(seen, count, total, pages=pages, config=own, fresh=fresh, signals=signals)
    packed = policy.compress(index, old, k, v, chunk)
    return packed, x, zero_after(*jax.tree.leaves([part.kv for part in parts(packed)])), signals


#: The same, traced and lowered once for all layers that are alike; XLA inlines it: the program is what it was.
_read_and_compress_once = jax.jit(_read_and_compress, static_argnames=("policy", "index", "pages", "fresh"))


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
    layers, x, _ = through_layers(
        params,
        policy,
        0,
        cache.layers,
        params.embed(jnp.maximum(tokens, 0)),
        cache.seen,
        count,
        total,
        pages,
        fresh=fresh,
        collector=collector,
        work=jnp.where(tokens[:, 0] < 0, 0, count),
        context=cache.context,
    )
    return after_reading(cache.replace(layers=layers), count), x


def after_reading(cache: Cache, count: Int[Array, " B"]) -> Cache:
    """The counters once ``count`` tokens of each row are in."""
    seen = cache.seen + count
    prompt_end = jnp.where(count > 0, seen, cache.prompt_end)
    return cache.replace(seen=seen, prompt_end=prompt_end, next_token=jnp.where(count > 0, NO_TOKEN, cache.next_token))


def zero_after(*made: Array) -> Int[Array, ""]:
    """A zero that is known only once these arrays are there.

    The next layer's dense buffers are filled with it, so no two layers' dense keys and values are alive at once. An
    optimization barrier alone does not do: XLA's CPU compiler drops it before scheduling, then prepares the buffers of
    all layers at the start of the program (measured: one layer's keys and values more for every layer). Nor do the
    numbers alone: a TPU's compiler finds the one that is read in what the pages are made of, and makes the pages of all
    layers at the end (compiled for v5e, 32 layers, 32,768 tokens: a half of the cache more at the peak).
    """
    bits = [jax.lax.bitcast_convert_type(x[(0,) * x.ndim].astype(jnp.float32), jnp.int32) & 1 for x in made]
    zero, *_ = jax.lax.optimization_barrier((jnp.minimum(sum(bits), 0), *made))
    return zero


def last_logits(params: Decoder, x: Float[Array, "B T M"], count: Int[Array, " B"]) -> Float[Array, "B V"]:
    last = jnp.maximum(count - 1, 0)[:, None, None]
    return params.logits(jnp.take_along_axis(x, last, axis=1)[:, 0])


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
    return cache.replace(**capacities), x


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
