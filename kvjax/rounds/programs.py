"""The compiled parts of a turn: lower layers, rounds into place, upper layers, and the new round cut out again.

Static are buckets of lengths, never a row's own: a turn in the same buckets compiles nothing. The layers above the
watershed are attended to as rows while the question is read; only what it leaves is packed into pages.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.pool import LayerCache, by_head, store, stored_rows
from kvjax.cache.storage import Storage
from kvjax.cache.value import Cache, Pools, attach, detach
from kvjax.model.decoder import Decoder
from kvjax.model.rope import token_angles
from kvjax.policies.signals import Signals
from kvjax.rounds.placed import Placed
from kvjax.rounds.value import UpperRows
from kvjax.runtime.buckets import BLOCK, block_of
from kvjax.runtime.prefill import Pages, after_reading, last_logits, read_layer, through_layers, zero_after
from kvjax.runtime.taps import LayerTap
from pallas_kernels.rows import Rows

#: Rows of the selected rounds, [L - Lw, 2, B, H, S, D].
Staged = Float[Array, "L 2 B H S D"]


def _lower(
    params: Decoder, cache: Cache, tokens: Int[Array, "B T"], count: Int[Array, " B"], pages: Pages, fresh: bool
) -> tuple[Cache, Float[Array, "B T M"], Float[Array, "B H C"] | None]:
    config, policy, seen = params.config, cache.policy, cache.seen
    last = len(cache.layers) - 1
    read = functools.partial(through_layers, params, policy)
    where = (seen, count, seen + count)
    below, x, _ = read(0, cache.layers[:last], params.embed(tokens), *where, pages[:last], fresh=fresh, tap=None)
    tap = None
    if not fresh:
        scale = policy.window_scale(config, seen)
        tap = LayerTap(Signals(columns=True), config, seen, count, jnp.zeros_like(count), scale, 0)
    at, x, found = read(last, cache.layers[last:], x, *where, pages[last:], fresh=fresh, tap=tap)
    mass = None
    if found is not None:
        assert found.columns is not None and found.columns.kept is not None
        mass = found.columns.kept.sum(axis=2)
    return after_reading(cache.replace(layers=(*below, *at)), count), x, mass


@functools.partial(jax.jit, static_argnames=("policy", "pages", "room", "new_room", "dtype", "storage"))
def lower_fresh(
    params: Decoder,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    *,
    policy: Placed,
    pages: Pages,
    room: int,
    new_room: int,
    dtype: Any,
    storage: Storage,
) -> tuple[Cache, Float[Array, "B T M"]]:
    """Read first questions through the layers below the watershed: their cache, and what the next layer reads."""
    zeros = jnp.zeros(tokens.shape[:1], jnp.int32)
    layers = tuple(
        policy.init_layer(params.config, i, tokens.shape[0], counts, dtype, storage) for i, counts in enumerate(pages)
    )
    cache = Cache(layers, zeros, zeros, zeros - 1, policy, room, new_room)
    cache, x, _ = _lower(params, cache, tokens, count, pages, fresh=True)
    return cache, x


def lower_onto(
    params: Decoder, cache: Cache, tokens: Int[Array, "B T"], count: Int[Array, " B"], *, consume: bool, **rooms: Any
) -> tuple[Cache, Float[Array, "B T M"], Float[Array, "B H C"]]:
    """Read later questions: also their attention to every slot of the last of these layers, summed over queries.

    ``rooms``: ``pages`` afterwards, ``room`` and ``new_room``. ``consume`` donates the cache given.
    """
    old, rest = detach(cache)
    reusable = rooms["pages"] == tuple(layer.pages for layer in cache.layers)
    run = _onto_consuming if consume and reusable else _onto
    pools, rest, x, mass = run(params, old, rest, tokens, count, **rooms)
    if consume and not reusable:
        jax.tree.map(lambda pool: pool.delete(), old)
    return attach(pools, rest), x, mass


def _lower_onto(
    params: Decoder,
    pools: Pools,
    rest: Cache,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    *,
    pages: Pages,
    room: int,
    new_room: int,
) -> tuple[Pools, Cache, Float[Array, "B T M"], Float[Array, "B H C"]]:
    cache, x, mass = _lower(params, attach(pools, rest), tokens, count, pages, fresh=False)
    assert mass is not None
    return *detach(cache.replace(prompt_room=room, new_room=new_room)), x, mass


_onto = jax.jit(_lower_onto, static_argnames=("pages", "room", "new_room"))
_onto_consuming = jax.jit(
    _lower_onto, static_argnames=("pages", "room", "new_room"), donate_argnames=("pools",)
)  # fmt: skip


@functools.partial(jax.jit, donate_argnames=("staged",))
def place(staged: Staged, part: UpperRows, row: Int[Array, ""], offset: Int[Array, "#L #H"]) -> Staged:
    """Write a round's rows into one row's, from slot ``offset`` of each layer and head on, in place.

    What is beyond the round's own length is finite and overwritten by the round that follows, or never valid. One
    offset [1, 1] for all layers and heads is one copy.
    """
    kv = part.kv
    if part.k_scale is not None and part.v_scale is not None:
        scales = jnp.broadcast_to(part.k_scale[:, :, None], (*kv.shape[:1], *kv.shape[2:]))
        kv = kv * jnp.stack([scales, jnp.broadcast_to(part.v_scale[..., None], scales.shape)], axis=1)
    kv = kv.astype(staged.dtype)[:, :, None]
    zero = jnp.int32(0)
    if offset.shape == (1, 1):
        return jax.lax.dynamic_update_slice(staged, kv, (zero, zero, row, zero, offset[0, 0], zero))
    layers, heads = offset.shape

    def one(i: Array, staged: Array) -> Array:
        layer, head = i // heads, i % heads
        piece = jax.lax.dynamic_slice(kv, (layer, zero, zero, head, zero, zero), (1, 2, 1, 1, *kv.shape[4:]))
        return jax.lax.dynamic_update_slice(staged, piece, (layer, zero, row, head, offset[layer, head], zero))

    return jax.lax.fori_loop(0, layers * heads, one, staged)


@functools.partial(jax.jit, static_argnames=("policy", "pages", "dtype", "storage"))
def upper(
    params: Decoder,
    x: Float[Array, "B T M"],
    seen: Int[Array, " B"],
    count: Int[Array, " B"],
    staged: Staged | None,
    length: Int[Array, "L B H"] | None,
    k_scale: Float[Array, "L B H D"] | None,
    *,
    policy: Placed,
    pages: Pages,
    dtype: Any,
    storage: Storage,
) -> tuple[tuple[LayerCache, ...], Float[Array, "B V"]]:
    """Finish reading a question above the watershed.

    Args:
      x: what the first of these layers reads; ``count`` tokens a row after ``seen``.
      staged: rows that the question sees, ``length`` of them by layer, row and head, with room for the question's own
        behind them; None for none.
      k_scale: of int8 key channels, at least what the selected rounds were stored with.

    Returns:
      The layers' caches with the selected rounds and the question, and the logits after each row's last token.
    """
    config = params.config
    batch, tokens, _ = x.shape
    blocks = (jnp.max(count) + block_of(tokens) - 1) // block_of(tokens)
    angles = token_angles(config, seen[:, None] + jnp.arange(tokens), seen + count)
    added = jnp.broadcast_to(count[:, None], (batch, config.num_kv_heads))
    zero, done = zero_after(x), []
    for i, counts in enumerate(pages):
        layer = params.layers[policy.watershed + i]
        kept = None
        if staged is not None and length is not None:
            kept = Rows(staged[i, 0], staged[i, 1], length[i], None, None, min(staged.shape[4], BLOCK))
        x, k, v, _ = read_layer(layer, x, angles, kept, blocks, zero, None, count)
        held = added
        if kept is not None:
            k, v = (_behind(old, new, kept.length) for old, new in ((kept.k, k), (kept.v, v)))
            held = held + kept.length
        empty = policy.init_layer(config, policy.watershed + i, batch, counts, dtype, storage)
        if empty.scales is not None and k_scale is not None:
            empty = empty.replace(scales=dataclasses.replace(empty.scales, k=k_scale[i]))
        packed = store(empty, k, v, held, counts)
        zero = zero_after(*jax.tree.leaves(packed.kv))
        done.append(packed)
    return tuple(done), last_logits(params, x, count)


def _behind(old: Float[Array, "B H S D"], new: Float[Array, "B H T D"], length: Int[Array, "B H"]) -> Array:
    """``new`` written behind the valid rows of ``old``, which has room for it."""
    write = jax.vmap(jax.vmap(lambda x, y, n: jax.lax.dynamic_update_slice_in_dim(x, y, n, axis=0)))
    return write(old, new.astype(old.dtype), length)


@functools.partial(jax.jit, static_argnames=("size",))
def cut(
    layers: tuple[LayerCache, ...], row: Int[Array, ""], start: Int[Array, "L H"], held: Int[Array, "L H"], *, size: int
) -> UpperRows:
    """One row's slots ``start .. start + held - 1`` of each layer and head as they are stored, padded to ``size``."""
    index = start[..., None] + jnp.arange(size)
    valid = jnp.arange(size) < held[..., None]
    found, k_scales, v_scales = [], [], []
    for i, layer in enumerate(layers):
        one = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, row, 0), layer)
        places = jnp.minimum(index[i], max(layer.slots) - 1)
        kv = jnp.stack([x[0] for x in stored_rows(one)])
        kv = jnp.take_along_axis(kv, places[None, ..., None], axis=2)
        found.append(jnp.where(valid[i, ..., None], kv, jnp.zeros((), kv.dtype)))
        if one.scales is not None:
            k_scales.append(one.scales.k[0])
            v_scales.append(jnp.take_along_axis(by_head(one, one.scales.v)[0], places, axis=1))
    if not k_scales:
        return UpperRows(jnp.stack(found))
    return UpperRows(jnp.stack(found), jnp.stack(k_scales), jnp.stack(v_scales))
