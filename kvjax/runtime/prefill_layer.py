"""One layer over a prompt: in blocks of queries, and a few rows at a time."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.buckets import block_of, keys_of, rows_together
from kvjax.model.alibi import query_bias
from kvjax.model.decoder import DecoderLayer
from kvjax.model.rope import Angles, apply_rope
from kvjax.runtime.layer_observer import LayerObserver
from pallas_kernels.kept_tokens import KeptTokens
from pallas_kernels.prefill import prefill
from pallas_kernels.softmax import with_sink


def read_layer(
    layer: DecoderLayer,
    x: Float[Array, "B T M"],
    rope: Angles,
    kept: KeptTokens | None,
    blocks: Int[Array, ""],
    zero: Int[Array, ""],
    collector: LayerObserver | None = None,
    count: Int[Array, " R"] | None = None,
    shared: tuple[KeptTokens, Int[Array, " R"]] | None = None,
    *,
    first: Int[Array, ""] | int = 0,
    rows: int | None = None,
) -> tuple[Float[Array, "B T M"], Float[Array, "R H T D"], Float[Array, "R H T D"], Any]:
    """One layer over the whole prompt in query blocks: hidden states out, its keys and values as cached, and what
    ``collector`` observed. ``count``, the tokens of each row, saves accelerators the work on padding. ``shared`` are
    rows of a context that all rows of the batch attend to, and the tokens before these of each.

    Of all rows, or of ``rows`` of them from ``first`` on, and then the other arguments are those of these rows alone.
    ``x`` and ``rope`` are of all rows, since a block at a time is cut out of them; the others' hidden states stay.
    """
    config = layer.config
    tokens, rows = x.shape[1], len(x) if rows is None else rows
    heads, group, dim = config.num_kv_heads, config.group_size, config.head_dim
    block = block_of(tokens)
    scale, sink_logits = config.attention_scale, layer.sink_logits
    taken = None if collector is None else collector.before_layer(layer, *_of_rows((x, rope), first, rows))

    def body(i: Int[Array, ""], carry: tuple[Array, Array, Array, Any]) -> tuple[Any, ...]:
        x, k, v, partial = carry
        xb, here = _of_rows((x, rope), first, rows, i * block, block)
        if count is not None:  # what CPUs multiply skips rows of zeros
            xb = jnp.where((i * block + jnp.arange(block) < count[:, None])[..., None], xb, 0)
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
        where: dict[str, Any] = {"offset": start, "length": length, "block": keys_of(tokens)}
        where |= {"scale": scale, "window": config.window, "soft_cap": config.attention_soft_cap}
        found = prefill(q, k, v, kept=kept, bias=linear, **where, **context)
        out, lse = found.out, found.lse
        if sink_logits is not None:
            out, lse = with_sink(out, lse, sink_logits[..., None])
        if collector is not None and partial is not None:
            partial = collector.after_block(partial, raw, q, lse, k, kept, i)
        attended = out.transpose(0, 3, 1, 2, 4)
        xb = layer.finish(xb, attended.astype(x.dtype))
        return jax.lax.dynamic_update_slice(x, xb, (first, i * block, 0)), k, v, partial

    empty = jnp.broadcast_to(zero.astype(x.dtype), (rows, heads, tokens, dim))
    partial = None if collector is None else collector.start(kept, tokens)
    x, k, v, partial = jax.lax.fori_loop(0, blocks, body, (x, empty, empty, partial))
    return x, k, v, None if collector is None else collector.finish(partial, taken, k, kept)


def _of_rows(
    tree: Any, first: Int[Array, ""] | int, rows: int, start: Int[Array, ""] | int = 0, size: int | None = None
) -> Any:
    """Rows from ``first`` on of arrays [B, T, ...], and ``size`` of their tokens; all share what has one row."""

    def cut(a: Array) -> Array:
        alike = len(a) == 1
        begin = (0 if alike else first, start, *(0,) * (a.ndim - 2))
        return jax.lax.dynamic_slice(a, begin, (1 if alike else rows, size or a.shape[1], *a.shape[2:]))

    return jax.tree.map(cut, tree)


def read_rows(
    layer: DecoderLayer,
    x: Float[Array, "B T M"],
    rope: Angles,
    kept: KeptTokens | None,
    count: Int[Array, " B"],
    zero: Int[Array, ""],
    collector: LayerObserver | None = None,
    shared: tuple[KeptTokens, Int[Array, " B"]] | None = None,
) -> tuple[Float[Array, "B T M"], Float[Array, "B H T D"], Float[Array, "B H T D"], Any]:
    """:func:`read_layer` over ``count`` tokens of each row, a few rows at a time (:func:`rows_together`).

    Rows that are read together and have no tokens cost nothing, and their hidden states stay as they are.
    """
    common, before = (None, None) if shared is None else shared
    batch, tokens, _ = x.shape
    block = block_of(tokens)
    together = rows_together(batch, block)

    def read(x: Float[Array, "B T M"], first: Int[Array, ""] | int, given: tuple[Any, ...]) -> tuple[Any, ...]:
        kept, count, collector, before = given
        blocks = (jnp.max(count) + block - 1) // block
        shared = None if common is None else (common, before)
        asked = kept, blocks, zero, collector, count, shared
        return read_layer(layer, x, rope, *asked, first=first, rows=together)

    given = (kept, count, collector, before)
    if together == batch:
        return read(x, 0, given)

    def part(x: Float[Array, "B T M"], i: Int[Array, ""]) -> tuple[Any, ...]:
        first = i * together
        return read(x, first, jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, together), given))

    def body(i: Int[Array, ""], done: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *made = part(done[0], i)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * together, axis=0)
        return x, *jax.tree.map(put, list(done[1:]), made)

    shapes = jax.eval_shape(part, x, zero)[1:]
    empty = [jnp.broadcast_to(zero.astype(a.dtype), (batch, *a.shape[1:])) for a in jax.tree.leaves(shapes)]
    done = (x, *jax.tree.unflatten(jax.tree.structure(shapes), empty))
    return jax.lax.fori_loop(0, batch // together, body, done)


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
