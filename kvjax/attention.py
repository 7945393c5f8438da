"""Attention of queries against the paged pool and against a prompt's own keys, in XLA.

The forms are chosen by measurement on 2 CPU cores (SmolLM2 float32, see ``cache/pool.py`` for the layout's part):
the scores of a decode step are a multiply-reduce over the pages, because XLA rewrites a ``dot_general`` with pages
among its free axes into one that needs a transposed copy of the whole cache (41 of 103 ms a step). Softmax and sums
are float32 whatever the cache's dtype.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pool import LayerCache, rows

# A finite stand-in for minus infinity: exp(NEG - m) is 0 for every reachable m and NEG - NEG is 0, not NaN.
NEG = -0.7 * float(np.finfo(np.float32).max)


def decode_attention(
    q: Float[Array, "B H G D"], cache: LayerCache, *, scale: float, with_logits: bool = False
) -> tuple[Float[Array, "B H G D"], Float[Array, "B P G R"] | None]:
    """One query token a row against the valid slots of its heads.

    Args:
      q: queries after rotary, grouped by KV head.
      cache: the layer's pool, the new token already in it; every head holds at least one valid slot.
      scale: multiplies q.k (1 / sqrt(D)).
      with_logits: also return the scaled scores by page, ``NEG`` where a slot is not valid; policies that evict by
        the new query's attention read them.

    Returns:
      ``(output in q's dtype, logits or None)``.
    """
    heads, group, dim = q.shape[1:]
    batch, total, _, page_size = cache.k.shape
    owner = np.repeat(np.arange(heads), cache.pages)
    first_slot = (np.arange(total) - np.asarray(cache.starts)[owner]) * page_size
    slot = jnp.asarray(first_slot[:, None] + np.arange(page_size), jnp.int32)  # [P, R], the slot within its head
    scaled = q.astype(jnp.float32) * scale
    logits = _page_scores(scaled, cache, owner)
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
        values = cache.v.reshape(*shape, page_size, dim)
        parts = jnp.einsum("bhpgr,bhprd->bhpgd", weight, values, preferred_element_type=jnp.float32)
        out = parts.sum(axis=2)
    else:
        out, mass = _ragged_softmax(logits, cache, owner)
    return (out / mass[..., None]).astype(q.dtype), logits if with_logits else None


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
    parts = jnp.einsum("bpgr,bprd->bpgd", weight, cache.v, preferred_element_type=jnp.float32)
    return jnp.einsum("hp,bpgd->bhgd", member, parts, precision=jax.lax.Precision.HIGHEST), mass


# A running softmax: (peak, mass, unnormalised output) of shapes [B, H, N], [B, H, N], [B, H, N, D].
Running = tuple[Float[Array, "B H N"], Float[Array, "B H N"], Float[Array, "B H N D"]]


def running_start(batch: int, heads: int, count: int, dim: int) -> Running:
    """A running softmax that has seen nothing; its mass is 0, so something must be attended to before dividing."""
    empty = jnp.zeros((batch, heads, count), jnp.float32)
    return empty + NEG, empty, jnp.zeros((batch, heads, count, dim), jnp.float32)


def attend_block(
    running: Running,
    q: Float[Array, "B H N D"],
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    visible: Bool[Array, "#B #H #N S"] | Bool[Array, "N S"],
    *,
    scale: float,
    bias: Float[Array, "B H S"] | None = None,
) -> Running:
    """Fold one block of keys and values into a running softmax."""
    peak, mass, out = running
    scores = jnp.einsum("bhnd,bhsd->bhns", q, k, preferred_element_type=jnp.float32) * scale
    if bias is not None:
        scores = scores + bias[:, :, None]
    scores = jnp.where(visible, scores, NEG)
    new_peak = jnp.maximum(peak, scores.max(axis=-1))
    # Masked weights are zeroed, not trusted to underflow: a row that sees nothing yet has peak NEG and exp(0) = 1.
    weight = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0.0)
    shrink = jnp.exp(peak - new_peak)
    gained = jnp.einsum("bhns,bhsd->bhnd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return new_peak, mass * shrink + weight.sum(axis=-1), out * shrink[..., None] + gained


@dataclasses.dataclass(frozen=True)
class KeptRows:
    """A layer's kept slots as rows, padded to whole blocks, for the queries of a later turn to attend to."""

    k: Float[Array, "B H C D"]
    v: Float[Array, "B H C D"]
    length: Int[Array, "B H"]
    log_mass: Float[Array, "B H"] | None
    block: int


def kept_rows(cache: LayerCache, block: int) -> KeptRows:
    """Bring a layer's pool into rows once a turn, for all the blocks of queries."""
    k, v = rows(cache)
    block = min(block, k.shape[2])
    padding = ((0, 0), (0, 0), (0, -k.shape[2] % block), (0, 0))
    return KeptRows(jnp.pad(k, padding), jnp.pad(v, padding), cache.length, cache.log_mass, block)


def attend_kept(running: Running, q: Float[Array, "B H N D"], kept: KeptRows, *, scale: float) -> Running:
    """Fold the kept slots into a running softmax, block by block; every query sees all of them."""
    block = kept.block

    def body(i: Int[Array, ""], carry: Running) -> Running:
        k = jax.lax.dynamic_slice_in_dim(kept.k, i * block, block, axis=2)
        v = jax.lax.dynamic_slice_in_dim(kept.v, i * block, block, axis=2)
        slot = i * block + jnp.arange(block)
        visible = (slot < kept.length[..., None])[:, :, None]
        bias = None if kept.log_mass is None else jnp.where(slot == 0, kept.log_mass[..., None], 0.0)
        return attend_block(carry, q, k, v, visible, scale=scale, bias=bias)

    return jax.lax.fori_loop(0, jnp.max(-(-kept.length // block)), body, running)


def attend_causal(
    running: Running,
    q: Float[Array, "B H N D"],
    k: Float[Array, "B H T D"],
    v: Float[Array, "B H T D"],
    index: Int[Array, ""],
    block: int,
    *,
    scale: float,
) -> Running:
    """Fold blocks ``0 .. index`` of a prompt's own keys into the running softmax of its query block ``index``.

    ``q`` holds G queries of each of the block's tokens, group-major: [B, H, G x block, D]. Never more scores than
    one block against one block, and only the blocks on and below the diagonal are computed.
    """
    token = jnp.tile(jnp.arange(block), q.shape[2] // block)[:, None]

    def body(j: Int[Array, ""], carry: Running) -> Running:
        kb = jax.lax.dynamic_slice_in_dim(k, j * block, block, axis=2)
        vb = jax.lax.dynamic_slice_in_dim(v, j * block, block, axis=2)
        visible = index * block + token >= j * block + jnp.arange(block)
        return attend_block(carry, q, kb, vb, visible, scale=scale)

    return jax.lax.fori_loop(0, index + 1, body, running)
