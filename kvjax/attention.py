"""Attention of queries against the paged pool, in XLA, and the pool as rows for prefill.

The forms are chosen by measurement on 2 CPU cores (SmolLM2 float32, see ``cache/pool.py`` for the layout's part):
the scores of a decode step are a multiply-reduce over the pages, because XLA rewrites a ``dot_general`` with pages
among its free axes into one that needs a transposed copy of the whole cache (41 of 103 ms a step). Softmax and sums
are float32 whatever the cache's dtype.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.groups import HeadGroups, Layer, parts
from kvjax.cache.pool import LayerCache, mark_rows, rows
from pallas_kernels.rows import Rows

# A finite stand-in for minus infinity: exp(NEG - m) is 0 for every reachable m and NEG - NEG is 0, not NaN.
NEG = -0.7 * float(np.finfo(np.float32).max)


def decode_attention(
    q: Float[Array, "B H G D"],
    layer: Layer,
    *,
    scale: float,
    slopes: Float[np.ndarray, "H G"] | None = None,
    position: Int[Array, " B"] | None = None,
    with_logits: bool = False,
) -> tuple[Float[Array, "B H G D"], Any]:
    """One query token a row against the valid slots of its heads.

    Args:
      q: queries after rotary, grouped by KV head.
      layer: its pool or pools, the new token already in; every head holds at least one valid slot.
      scale: multiplies q.k (1 / sqrt(D)).
      slopes: ALiBi's, of each query head; then every slot's mark "position" counts, and the queries' ``position``.
      with_logits: also return the scaled scores by page, ALiBi's bias in them, ``NEG`` where a slot is not valid;
        policies that evict by the new query's attention read them.

    Returns:
      ``(output in q's dtype, logits or None)``: logits [B, P, G, R], or a tuple of them for a layer in groups.
    """
    bias = None if slopes is None or position is None else _Linear(slopes, position)
    if not isinstance(layer, HeadGroups):
        return _decode_pool(q, layer, scale, bias, with_logits)
    groups = zip(layer.split(q), layer.groups, layer.heads, strict=True)
    done = [_decode_pool(x, pool, scale, bias and bias.of(heads), with_logits) for x, pool, heads in groups]
    return layer.join([out for out, _ in done]), tuple(logits for _, logits in done) if with_logits else None


@dataclasses.dataclass(frozen=True)
class _Linear:
    """ALiBi of one query a row."""

    slopes: Float[np.ndarray, "H G"]
    position: Int[Array, " B"]

    def of(self, heads: tuple[int, ...]) -> _Linear:
        """Of some of the KV heads."""
        return _Linear(self.slopes[np.asarray(heads)], self.position)


def slot_bias(
    cache: LayerCache, slopes: Float[np.ndarray, "H G"], position: Int[Array, " B"]
) -> Float[Array, "B P G R"]:
    """ALiBi's bias of every slot for queries at these positions; what is in no valid slot is finite."""
    owner = np.repeat(np.arange(len(cache.pages)), cache.pages)
    distance = cache.marks["position"] - position[:, None, None]
    return jnp.asarray(slopes[owner])[:, :, None] * distance[:, :, None]


def _decode_pool(
    q: Float[Array, "B H G D"], cache: LayerCache, scale: float, bias: _Linear | None, with_logits: bool
) -> tuple[Float[Array, "B H G D"], Float[Array, "B P G R"] | None]:
    heads, group, dim = q.shape[1:]
    batch, total, _, page_size = cache.k.shape
    owner = np.repeat(np.arange(heads), cache.pages)
    first_slot = (np.arange(total) - np.asarray(cache.starts)[owner]) * page_size
    slot = jnp.asarray(first_slot[:, None] + np.arange(page_size), jnp.int32)  # [P, R], the slot within its head
    scaled = q.astype(jnp.float32) * scale
    if cache.scales is not None:
        scaled = scaled * cache.scales.k[:, :, None]
    logits = _page_scores(scaled, cache, owner)
    if bias is not None:
        logits = logits + slot_bias(cache, bias.slopes, bias.position)
    if cache.log_mass is not None:
        logits = logits + jnp.where(slot == 0, cache.log_mass[:, owner][:, :, None], 0.0)[:, :, None]
    valid = slot < cache.length[:, owner][:, :, None]
    logits = jnp.where(valid[:, :, None], logits, NEG)
    if cache.uniform:
        shape = (batch, heads, cache.pages[0])
        by_head = logits.reshape(*shape, group, page_size)
        peak = by_head.max(axis=(2, 4), keepdims=True)
        weight = jnp.exp(by_head - peak)
        mass = weight.sum(axis=(2, 4))
        if cache.scales is not None:
            weight = weight * cache.scales.v.reshape(*shape, 1, page_size)
        values = cache.v.reshape(*shape, page_size, dim)
        summed = jnp.einsum("bhpgr,bhprd->bhpgd", weight, _wide(values), preferred_element_type=jnp.float32)
        out = summed.sum(axis=2)
    else:
        out, mass = _ragged_softmax(logits, cache, owner)
    return (out / mass[..., None]).astype(q.dtype), logits if with_logits else None


def _wide(values: Array) -> Array:
    """Stored values as a product takes them: int8 numbers as floats, their scale is in the weights."""
    return values.astype(jnp.float32) if values.dtype == jnp.int8 else values


def _page_scores(q: Float[Array, "B H G D"], cache: LayerCache, owner: np.ndarray) -> Float[Array, "B P G R"]:
    """q.k of every slot, reading each page of keys once."""
    batch, total, dim, page_size = cache.k.shape
    keys = cache.k.astype(jnp.float32)
    if cache.uniform:
        heads, count = q.shape[1], cache.pages[0]
        keys = keys.reshape(batch, heads, count, 1, dim, page_size)
        scores = jnp.sum(q[:, :, None, :, :, None] * keys, axis=4)
        return scores.reshape(batch, total, -1, page_size)
    return jnp.sum(q[:, owner][..., None] * keys[:, :, None], axis=3)


def _ragged_softmax(
    logits: Float[Array, "B P G R"], cache: LayerCache, owner: np.ndarray
) -> tuple[Float[Array, "B H G D"], Float[Array, "B H G"]]:
    """Unnormalised output and mass when heads own different numbers of pages.

    Only page-sized partial results are brought from pages to heads; the pool itself is read in place.
    """
    heads, longest = len(cache.pages), max(cache.pages)
    index = np.asarray(cache.starts)[:, None] + np.arange(longest)
    index = np.where(np.arange(longest) < np.asarray(cache.pages)[:, None], index, owner.shape[0])
    page_peak = jnp.pad(logits.max(axis=3), ((0, 0), (0, 1), (0, 0)), constant_values=NEG)
    peak = page_peak[:, index].max(axis=2)  # [B, H, G]
    weight = jnp.exp(logits - peak[:, owner][..., None])
    # The pages of a head are summed by a constant 0/1 matrix: as exact as a loop over heads, and one product.
    member = jnp.asarray(owner == np.arange(heads)[:, None], jnp.float32)
    mass = jnp.einsum("hp,bpg->bhg", member, weight.sum(axis=3), precision=jax.lax.Precision.HIGHEST)
    if cache.scales is not None:
        weight = weight * cache.scales.v[:, :, None]
    parts = jnp.einsum("bpgr,bprd->bpgd", weight, _wide(cache.v), preferred_element_type=jnp.float32)
    return jnp.einsum("hp,bpgd->bhgd", member, parts, precision=jax.lax.Precision.HIGHEST), mass


def kept_rows(layer: Layer, block: int, seen: Int[Array, " B"] | None = None) -> Rows:
    """Bring a layer's pools into rows once a turn, for all the blocks of queries.

    ``seen``, the tokens before the turn, is given for ALiBi, where a slot's mark "position" makes its bias: places are
    counted from the turn's first token, so these are negative.
    """
    pools = parts(layer)
    longest = max(max(pool.slots) for pool in pools)
    block = min(block, longest)
    longest += -longest % block

    def padded(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, longest - x.shape[2])) + ((0, 0),) * (x.ndim - 3))

    runs = [tuple(padded(x) for x in rows(pool)) for pool in pools]
    masses = [jnp.zeros(pool.length.shape) if pool.log_mass is None else pool.log_mass for pool in pools]
    join = layer.join if isinstance(layer, HeadGroups) else (lambda whole: whole[0])
    k, v = join([part[0] for part in runs]), join([part[1] for part in runs])
    mass = None if all(pool.log_mass is None for pool in pools) else join(masses)
    place = None
    if seen is not None:
        place = join([padded(mark_rows(pool, "position")) for pool in pools]) - seen[:, None, None]
    return Rows(k, v, layer.length, mass, place, block)
