"""Attention of queries against the paged pool, by ``pallas_kernels``, and the pool as rows for prefill.

Softmax and sums are float32 whatever the cache's dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import runs
from kvjax.cache.groups import HeadGroups, Layer, parts, with_parts
from kvjax.cache.key_channels import cut
from kvjax.cache.layer_view import LayerView
from kvjax.cache.page_sharding import PageSharding
from kvjax.cache.pool import LayerCache, keys_and_values, mark_by_head
from kvjax.cache.shared_context import SharedLayer
from pallas_kernels.kept_tokens import KeptTokens
from pallas_kernels.ragged_decode import Decoded, Shared, ragged_decode
from pallas_kernels.softmax import NEG, with_sink


def decode_attention(
    q: Float[Array, "B H G D"],
    layer: Layer,
    *,
    scale: float,
    soft_cap: float | None = None,
    slopes: Float[np.ndarray, "H G"] | None = None,
    position: Int[Array, " B"] | None = None,
    with_logits: bool = False,
    first_row: Int[Array, ""] | None = None,
    shared: SharedLayer | None = None,
    sink_logits: Float[Array, "B H G"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H G D"], Any]:
    """One query token a row against the valid slots of its heads.

    Args:
      q: queries after rotary, grouped by KV head.
      layer: its pool or pools, the new token already in; every head holds at least one valid slot.
      shared: for each of its pools one that all rows attend to as well, or None.
      scale: multiplies q.k (1 / sqrt(D)). soft_cap: bounds that, before any bias.
      slopes: ALiBi's, of each query head; then every slot's mark "position" counts, and the queries' ``position``.
      sink_logits: one more logit of each query head's softmax, which brings no value.
      with_logits: also return the scaled scores by page, ALiBi's bias in them, ``NEG`` where a slot is not valid;
        policies that evict by the new query's attention read them.
      first_row: given where the queries, ``position`` and results are those of some rows of the layer, from this one.
      implementation: of ``pallas_kernels.ragged_decode``; by default the first of the platform's that fits.

    Returns:
      ``(output in q's dtype, logits or None)``: logits [B, P, G, R], or a tuple of them for a layer in groups.
    """

    attend = functools.partial(
        _attend_pool,
        scale=scale,
        soft_cap=soft_cap,
        position=position,
        with_logits=with_logits,
        first_row=first_row,
        implementation=implementation,
    )
    contexts = (None,) * len(parts(layer)) if shared is None else shared
    if not isinstance(layer, HeadGroups):
        done = attend(q, layer, slopes, contexts[0])
        return done.out if sink_logits is None else with_sink(done.out, done.lse, sink_logits)[0], done.logits
    groups = zip(layer.split(q), layer.groups, layer.heads, contexts, strict=True)
    outputs = [
        attend(x, pool, None if slopes is None else slopes[np.asarray(heads)], one) for x, pool, heads, one in groups
    ]
    out = layer.join([part.out for part in outputs])
    if sink_logits is not None:
        out, _ = with_sink(out, layer.join([part.lse for part in outputs]), sink_logits)
    return out, tuple(part.logits for part in outputs) if with_logits else None


def _attend_pool(
    q: Float[Array, "B H G D"],
    pool: LayerCache,
    slopes: Float[np.ndarray, "H G"] | None,
    context: LayerCache | None,
    *,
    position: Int[Array, " B"] | None,
    first_row: Int[Array, ""] | None,
    **options: Any,
) -> Decoded:
    """:func:`decode_attention` over one pool, on all of its devices; ``context``: what all rows attend to as well."""

    def own(x: Any) -> Any:
        return x if first_row is None or x is None else jax.lax.dynamic_slice_in_dim(x, first_row, q.shape[0])

    sharding, mass = pool.sharding, own(pool.log_mass)
    if sharding.page_axes and mass is not None:
        mass = jnp.where(sharding.index() == 0, mass, 0.0)  # slot 0 is the first device's
    done = ragged_decode(
        cut(q, own(pool.channels)),
        pool.kv,
        sharding.local_length(own(pool.length), pool.page_size),
        runs=_runs_of(pool),
        starts=sharding.local_starts(own(pool.row_starts)),
        part=isinstance(pool, LayerView),
        log_mass=mass,
        k_scale=pool.scales and own(pool.scales.k),
        v_scale=pool.scales and pool.scales.v,
        slopes=slopes,
        position=None if slopes is None else sharding.local_pages(pool.marks["position"]),
        query_position=None if slopes is None else position,
        first_row=first_row,
        shared=None if context is None else _shared_pages(context, slopes is not None),
        **options,
    )
    return merged(done, sharding)


def _runs_of(pool: LayerCache) -> tuple[int, ...]:
    """Pages of each head on this device, or the most that one has in any row."""
    if pool.row_starts is None:
        return pool.sharding.local_counts(pool.pages)
    return (-(-pool.most_pages // pool.sharding.page_parts),) * len(pool.pages)


def _shared_pages(pool: LayerCache, placed: bool) -> Shared:
    """This device's part of a shared pool, as attention takes it."""
    sharding = pool.sharding
    return Shared(
        pool.kv,
        sharding.local_length(pool.length, pool.page_size),
        _runs_of(pool),
        sharding.local_pages(pool.marks["position"]) if placed else None,
        sharding.local_starts(pool.row_starts),
        pool.scales and pool.scales.k,
        pool.scales and pool.scales.v,
        isinstance(pool, LayerView),
    )


def merged(done: Decoded, sharding: PageSharding) -> Decoded:
    """Attention over the pages of all devices, merged from each device's attention over its own."""
    if not sharding.page_axes:
        return done
    peak = jax.lax.pmax(done.lse, sharding.page_axes)
    weight = jnp.where(done.lse > NEG, jnp.exp(done.lse - peak), 0.0)
    # Where a device has no visible slot its result may be anything.
    part = jnp.where(weight[..., None] > 0, done.out.astype(jnp.float32) * weight[..., None], 0.0)
    both = jax.lax.psum(jnp.concatenate([part, weight[..., None]], axis=-1), sharding.page_axes)
    mass = both[..., -1]
    out = both[..., :-1] / jnp.maximum(mass, 1e-37)[..., None]
    logits = None if done.logits is None else sharding.gather(done.logits)
    return Decoded(out.astype(done.out.dtype), peak + jnp.log(jnp.maximum(mass, 1e-37)), logits)


def slot_bias(
    cache: LayerCache, slopes: Float[np.ndarray, "H G"], position: Int[Array, " B"]
) -> Float[Array, "B P G R"]:
    """ALiBi's bias of every slot for queries at these positions; what is in no valid slot is finite."""
    distance = cache.marks["position"] - position[:, None, None]
    if cache.row_starts is not None:
        owner, _ = runs.owners(cache.row_starts, sum(cache.pages))
        return jnp.asarray(slopes)[owner][..., None] * distance[:, :, None]
    owner = np.repeat(np.arange(len(cache.pages)), cache.pages)
    return jnp.asarray(slopes[owner])[:, :, None] * distance[:, :, None]


def kept_tokens(layer: Layer, block: int, seen: Int[Array, " B"] | None = None) -> KeptTokens:
    """Copy a layer's pools to contiguous slots, once a prompt chunk, for all its blocks of queries.

    ``seen``, the tokens before the chunk, is given for ALiBi, where a slot's mark "position" makes its bias: positions
    are counted from the chunk's first token, so those of kept slots are negative.
    """
    pools = parts(layer)
    longest = max(max(pool.most_slots) for pool in pools)
    block = min(block, longest)
    longest += -longest % block

    def padded(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, longest - x.shape[2])) + ((0, 0),) * (x.ndim - 3))

    found = [tuple(padded(x) for x in keys_and_values(pool)) for pool in pools]
    masses = [jnp.zeros(pool.length.shape) if pool.log_mass is None else pool.log_mass for pool in pools]
    join = layer.join if isinstance(layer, HeadGroups) else (lambda whole: whole[0])
    k, v = join([part[0] for part in found]), join([part[1] for part in found])
    mass = None if all(pool.log_mass is None for pool in pools) else join(masses)
    place = None
    if seen is not None:
        place = join([padded(mark_by_head(pool, "position")) for pool in pools]) - seen[:, None, None]
    return KeptTokens(k, v, layer.length, mass, place, block)


def shared_kept_tokens(shared: SharedLayer, layer: Layer, block: int, placed: bool) -> KeptTokens | None:
    """:func:`kept_tokens` of a layer's shared pools; heads that share nothing have none. None where no head does.

    ``placed`` is given for ALiBi; positions are then counted from the row's first token.
    """
    if all(pool is None for pool in shared):
        return None
    held = [_nothing(own) if pool is None else pool for pool, own in zip(shared, parts(layer), strict=True)]
    return kept_tokens(with_parts(layer, held), block, jnp.zeros((1,), jnp.int32) if placed else None)


def _nothing(own: LayerCache) -> LayerCache:
    """A pool of one row like this one, without a slot that is valid."""
    first = jax.tree.map(lambda x: x[:1], own.replace(state=None))
    return first.replace(length=jnp.zeros_like(first.length))
