"""The steps of a turn: read the lower layers, place the selected rounds, read the upper layers, copy the new round out.

Pure functions of arrays, which ``round_programs.py`` compiles for one device or for a mesh, where a device has some of
the heads, or some of their slots. Static are buckets of lengths, never a row's own: a turn in the same buckets compiles
nothing. The layers above the watershed are attended to as dense keys and values while the question is read; only the
result is packed into pages.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.buckets import BLOCK, NEW_TOKENS
from kvjax.cache.cache import Cache
from kvjax.cache.groups import rounded
from kvjax.cache.packing import store
from kvjax.cache.page_sharding import PageSharding
from kvjax.cache.pool import LayerCache, gather_pages
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder
from kvjax.model.rope import angles_of_layers
from kvjax.policies.page_capacities import page_capacities
from kvjax.policies.signals import Signals
from kvjax.policies.token_counts import numpy_or_jax
from kvjax.rounds.conversation import UpperRows
from kvjax.runtime.prefill import Pages, after_reading, last_logits, through_layers
from kvjax.runtime.prefill_layer import read_rows, zero_after
from kvjax.runtime.signal_collector import SignalCollector
from pallas_kernels.kept_tokens import KeptTokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StagingBuffer:
    """The rounds that a batch's questions see, in the layers above the watershed, one behind the other.

    Attributes:
      kv: [L - Lw, 2, B, H, S, D] keys and values of S slots; real numbers.
      k_scale: [L - Lw, B, H, D], of int8 key channels at least what the rounds were stored with, or None.
    """

    kv: Float[Array, "L 2 B H S D"]
    k_scale: Float[Array, "L B H D"] | None

    def logical_axes(self) -> list[tuple[str | None, ...]]:
        """Axes of its arrays on a mesh; devices that share a head have a block of its slots each."""
        kv = (None, None, "batch", "kv_head", "slot")
        return [kv] if self.k_scale is None else [kv, (None, "batch", "kv_head")]


def empty_stage(shape: tuple[int, ...], dtype: Any, quantised: bool) -> StagingBuffer:
    """Zeros [L, 2, B, H, S, D]; rounds of int8 storage come as float32."""
    layers, _, batch, heads, _, dim = shape
    scales = jnp.zeros((layers, batch, heads, dim), jnp.float32) if quantised else None
    return StagingBuffer(jnp.zeros(shape, jnp.float32 if quantised else dtype), scales)


def pages_onto(config: ModelConfig, cache: Cache, capacity: int) -> Pages:
    """Pages of the layers below the watershed once rows hold ``capacity`` slots; ``config`` as the device sees it."""
    wanted = page_capacities(cache.policy, config, capacity, NEW_TOKENS, cache.page_size)
    return tuple(rounded(layer, pages) for layer, pages in zip(cache.layers, wanted, strict=False))


def read_lower(
    params: Decoder, cache: Cache, tokens: Int[Array, "B T"], count: Int[Array, " B"], pages: Pages
) -> tuple[Cache, Float[Array, "B T M"], Float[Array, "B H C"]]:
    """Read later questions through the layers below the watershed.

    Returns:
      Their cache, what the next layer reads, and the questions' attention to every slot of the last of these layers,
      summed over queries.
    """
    config, policy, seen = params.config, cache.policy, cache.seen
    last = len(cache.layers) - 1
    read = functools.partial(through_layers, params, policy, fresh=False)
    where = (seen, count, seen + count)
    below, x, _ = read(0, cache.layers[:last], params.embed(tokens), *where, pages[:last], collector=None)
    scale = policy.window_scale(config, seen)
    collector = SignalCollector(Signals(columns=True), config, seen, count, jnp.zeros_like(count), scale, 0)
    at, x, found = read(last, cache.layers[last:], x, *where, pages[last:], collector=collector)
    assert found is not None and found.columns is not None and found.columns.kept is not None
    return after_reading(cache.replace(layers=(*below, *at)), count), x, found.columns.kept.sum(axis=2)


def place(
    sharding: PageSharding, staged: StagingBuffer, part: UpperRows, row: Int[Array, ""], offset: Int[Array, "#L #H"]
) -> StagingBuffer:
    """Write a round's rows into one row's, from slot ``offset`` of each layer and head on, in place.

    What is beyond the round's own length is finite and overwritten by the round that follows, or never valid. One
    offset [1, 1] for all layers and heads is one copy.
    """
    kv, k_scale = sharding.gather_axis(part.kv, 3), staged.k_scale
    if part.k_scale is not None and part.v_scale is not None:
        assert k_scale is not None
        scales = jnp.broadcast_to(part.k_scale[:, :, None], (*kv.shape[:1], *kv.shape[2:]))
        values = jnp.broadcast_to(sharding.gather_axis(part.v_scale, 2)[..., None], scales.shape)
        kv = kv * jnp.stack([scales, values], axis=1)
        k_scale = k_scale.at[:, row].max(part.k_scale)
    kv = kv.astype(staged.kv.dtype)[:, :, None]
    if offset.shape == (1, 1):
        return StagingBuffer(_written(staged.kv, kv, (0, 0, row, 0), offset[0, 0], sharding), k_scale)
    layers, heads = offset.shape

    def one(i: Array, into: Array) -> Array:
        layer, head = i // heads, i % heads
        piece = jax.lax.dynamic_slice(kv, (layer, 0, 0, head, 0, 0), (1, 2, 1, 1, *kv.shape[4:]))
        return _written(into, piece, (layer, 0, row, head), offset[layer, head], sharding)

    return StagingBuffer(jax.lax.fori_loop(0, layers * heads, one, staged.kv), k_scale)


def _written(into: Array, piece: Array, where: tuple[Array | int, ...], offset: Array, sharding: PageSharding) -> Array:
    """``piece`` written from slot ``offset`` on; of slots that devices have in blocks, this device's."""
    where = tuple(jnp.asarray(i, jnp.int32) for i in where)
    zero = jnp.int32(0)
    if not sharding.page_axes:
        return jax.lax.dynamic_update_slice(into, piece, (*where, offset, zero))
    slots, size = piece.shape[4], into.shape[4]
    width, first = min(slots, size), sharding.index() * size
    start = jnp.clip(offset - first, 0, size - width)
    source = first + start - offset + jnp.arange(width)
    here = ((source >= 0) & (source < slots))[:, None]
    old = jax.lax.dynamic_slice(into, (*where, start, zero), (*piece.shape[:4], width, piece.shape[5]))
    new = jnp.where(here, jnp.take(piece, jnp.clip(source, 0, slots - 1), axis=4), old)
    return jax.lax.dynamic_update_slice(into, new, (*where, start, zero))


def read_upper(
    params: Decoder,
    empty: tuple[LayerCache, ...],
    x: Float[Array, "B T M"],
    seen: Int[Array, " B"],
    count: Int[Array, " B"],
    staged: StagingBuffer,
    length: Int[Array, "L B H"],
) -> tuple[tuple[LayerCache, ...], Float[Array, "B V"]]:
    """Finish reading a later question above the watershed.

    Args:
      empty: the layers' caches, which hold nothing.
      x: what the first of them reads; ``count`` tokens a row after ``seen``.
      staged: rows that the question sees, ``length`` of them by layer, row and head, with room for the question's own
        behind them.

    Returns:
      The caches with the selected rounds and the question, and the logits after each row's last token.
    """
    first = params.config.num_layers - len(empty)
    tokens = x.shape[1]
    configs = [layer.config for layer in params.layers][first:]
    angles = angles_of_layers(configs, seen[:, None] + jnp.arange(tokens), seen + count)
    zero, done = zero_after(x), []
    for i, cache in enumerate(empty):
        layer = params.layers[first + i]
        old_k, old_v = cache.sharding.gather_axis(staged.kv[i], 3)
        kept = KeptTokens(old_k, old_v, length[i], None, None, min(old_k.shape[2], BLOCK))
        x, k, v, _ = read_rows(layer, x, angles[i], kept, count, zero)
        held = jnp.broadcast_to(count[:, None], k.shape[:2]) + kept.length
        k, v = (_behind(old, new, kept.length) for old, new in ((kept.k, k), (kept.v, v)))
        if cache.scales is not None and staged.k_scale is not None:
            cache = cache.replace(scales=dataclasses.replace(cache.scales, k=staged.k_scale[i]))
        packed = store(cache, k, v, held, cache.pages)
        zero = zero_after(*jax.tree.leaves(packed.kv))
        done.append(packed)
    return tuple(done), last_logits(params, x, count)


def _behind(old: Float[Array, "B H S D"], new: Float[Array, "B H T D"], length: Int[Array, "B H"]) -> Array:
    """``new`` written behind the valid rows of ``old``, which has room for it."""
    write = jax.vmap(jax.vmap(lambda x, y, n: jax.lax.dynamic_update_slice_in_dim(x, y, n, axis=0)))
    return write(old, new.astype(old.dtype), length)


def cut(
    layers: tuple[LayerCache, ...],
    row: int | Int[Array, ""],
    start: Int[Array | np.ndarray, "L H"],
    held: Int[Array | np.ndarray, "L H"],
    size: int,
) -> UpperRows:
    """One row's slots ``start .. start + held - 1`` of each layer and head as they are stored, padded to ``size``.

    Of NumPy's arrays the result is NumPy's. Where devices share a head's pages, each gives its block of the slots.
    """
    xp, sharding, page_size = numpy_or_jax(start), layers[0].sharding, layers[0].page_size
    valid = xp.arange(size) < held[..., None]
    # The pages that any so many slots are in; of these, gathered whole, the slots.
    first, pages = start // page_size, np.arange(-(-size // page_size) + 1)
    slot = (start % page_size)[..., None] + np.arange(size)
    found, k_scales, v_scales = [], [], []
    for i, layer in enumerate(layers):
        one = gather_pages(jax.tree.map(lambda x: x[row][None], layer))
        inside = xp.minimum(first[i][:, None] + pages, np.asarray(one.pages)[:, None] - 1)
        where: Any = 0, np.asarray(one.starts)[:, None] + inside
        heads = np.arange(len(one.pages))[:, None]

        def slots(of_pages: Any, heads: Any = heads, here: Any = slot[i]) -> Any:
            return of_pages.reshape(len(of_pages), -1, *of_pages.shape[3:])[heads, here]

        kv = xp.stack([slots(x) for x in one.kv.at_pages(where)])
        found.append(sharding.shard_axis(xp.where(valid[i, ..., None], kv, xp.zeros((), kv.dtype)), 2))
        if one.scales is not None:
            k_scales.append(one.scales.k[0])
            v_scales.append(sharding.shard_axis(slots(one.scales.v[where]), 1))
    if not k_scales:
        return UpperRows(xp.stack(found))
    return UpperRows(xp.stack(found), xp.stack(k_scales), xp.stack(v_scales))
