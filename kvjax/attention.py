"""Attention of queries against the paged pool, by ``pallas_kernels``, and against a prompt's own keys.

Softmax and sums are float32 whatever the cache's dtype.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.groups import HeadGroups, Layer, parts
from kvjax.cache.pool import LayerCache, mark_rows, rows
from kvjax.model.alibi import QueryBias
from pallas_kernels.ragged_decode import Decoded, ragged_decode
from pallas_kernels.ragged_decode.problem import NEG


def decode_attention(
    q: Float[Array, "B H G D"],
    layer: Layer,
    *,
    scale: float,
    slopes: Float[np.ndarray, "H G"] | None = None,
    position: Int[Array, " B"] | None = None,
    with_logits: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H G D"], Any]:
    """One query token a row against the valid slots of its heads.

    Args:
      q: queries after rotary, grouped by KV head.
      layer: its pool or pools, the new token already in; every head holds at least one valid slot.
      scale: multiplies q.k (1 / sqrt(D)).
      slopes: ALiBi's, of each query head; then every slot's mark "position" counts, and the queries' ``position``.
      with_logits: also return the scaled scores by page, ALiBi's bias in them, ``NEG`` where a slot is not valid;
        policies that evict by the new query's attention read them.
      implementation: of ``pallas_kernels.ragged_decode``; by default the first of the platform's that fits.

    Returns:
      ``(output in q's dtype, logits or None)``: logits [B, P, G, R], or a tuple of them for a layer in groups.
    """

    def attend(q: Array, pool: LayerCache, slopes: np.ndarray | None) -> Decoded:
        return ragged_decode(
            q,
            pool.kv,
            pool.length,
            runs=pool.pages,
            scale=scale,
            log_mass=pool.log_mass,
            k_scale=pool.scales and pool.scales.k,
            v_scale=pool.scales and pool.scales.v,
            slopes=slopes,
            position=None if slopes is None else pool.marks["position"],
            query_position=None if slopes is None else position,
            with_logits=with_logits,
            implementation=implementation,
        )

    if not isinstance(layer, HeadGroups):
        done = attend(q, layer, slopes)
        return done.out, done.logits
    groups = zip(layer.split(q), layer.groups, layer.heads, strict=True)
    parted = [attend(x, pool, None if slopes is None else slopes[np.asarray(heads)]) for x, pool, heads in groups]
    return layer.join([part.out for part in parted]), tuple(part.logits for part in parted) if with_logits else None


def slot_bias(
    cache: LayerCache, slopes: Float[np.ndarray, "H G"], position: Int[Array, " B"]
) -> Float[Array, "B P G R"]:
    """ALiBi's bias of every slot for queries at these positions; what is in no valid slot is finite."""
    owner = np.repeat(np.arange(len(cache.pages)), cache.pages)
    distance = cache.marks["position"] - position[:, None, None]
    return jnp.asarray(slopes[owner])[:, :, None] * distance[:, :, None]


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
    bias: Float[Array, "#B #H #N S"] | None = None,
) -> Running:
    """Fold one block of keys and values into a running softmax; ``bias`` is added to the scaled scores."""
    peak, mass, out = running
    scores = jnp.einsum("bhnd,bhsd->bhns", q, k, preferred_element_type=jnp.float32) * scale
    if bias is not None:
        scores = scores + bias
    scores = jnp.where(visible, scores, NEG)
    new_peak = jnp.maximum(peak, scores.max(axis=-1))
    # Masked weights are zeroed, not trusted to underflow: a row that sees nothing yet has peak NEG and exp(0) = 1.
    weight = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0.0)
    shrink = jnp.exp(peak - new_peak)
    gained = jnp.einsum("bhns,bhsd->bhnd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return new_peak, mass * shrink + weight.sum(axis=-1), out * shrink[..., None] + gained


@dataclasses.dataclass(frozen=True)
class KeptRows:
    """A layer's kept slots as rows, padded to whole blocks, for the queries of a later turn to attend to.

    ``place`` is counted from the turn's first token, so negative; None where no bias depends on it.
    """

    k: Float[Array, "B H C D"]
    v: Float[Array, "B H C D"]
    length: Int[Array, "B H"]
    log_mass: Float[Array, "B H"] | None
    place: Int[Array, "B H C"] | None
    block: int

    @property
    def blocks(self) -> Int[Array, ""]:
        """Blocks that hold a valid slot of any head."""
        return jnp.max(-(-self.length // self.block))

    def block_of(self, i: Int[Array, ""], linear: QueryBias | None) -> tuple[Array, Array, Array, Array | None]:
        """Keys and values [B, H, S, D] of a block, what is visible [B, H, 1, S], and a bias [B, H, #N, S] or None."""
        k = jax.lax.dynamic_slice_in_dim(self.k, i * self.block, self.block, axis=2)
        v = jax.lax.dynamic_slice_in_dim(self.v, i * self.block, self.block, axis=2)
        slot = i * self.block + jnp.arange(self.block)
        visible = (slot < self.length[..., None])[:, :, None]
        bias = None if self.log_mass is None else jnp.where(slot == 0, self.log_mass[..., None], 0.0)[:, :, None]
        if linear is not None and self.place is not None:
            place = jax.lax.dynamic_slice_in_dim(self.place, i * self.block, self.block, axis=2)
            bias = linear(place) if bias is None else linear(place) + bias
        return k, v, visible, bias


def kept_rows(layer: Layer, block: int, seen: Int[Array, " B"] | None = None) -> KeptRows:
    """Bring a layer's pools into rows once a turn, for all the blocks of queries.

    ``seen``, the tokens before the turn, is given for ALiBi, where a slot's mark "position" makes its bias.
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
    return KeptRows(k, v, layer.length, mass, place, block)


def attend_kept(
    running: Running,
    q: Float[Array, "B H N D"],
    kept: KeptRows,
    *,
    scale: float,
    linear: QueryBias | None = None,
) -> Running:
    """Fold the kept slots into a running softmax, block by block; every query sees all of them."""

    def body(i: Int[Array, ""], carry: Running) -> Running:
        k, v, visible, bias = kept.block_of(i, linear)
        return attend_block(carry, q, k, v, visible, scale=scale, bias=bias)

    return jax.lax.fori_loop(0, kept.blocks, body, running)


def attend_causal(
    running: Running,
    q: Float[Array, "B H N D"],
    k: Float[Array, "B H T D"],
    v: Float[Array, "B H T D"],
    index: Int[Array, ""],
    block: int,
    *,
    scale: float,
    linear: QueryBias | None = None,
) -> Running:
    """Fold blocks ``0 .. index`` of a prompt's own keys into the running softmax of its query block ``index``.

    ``q`` holds G queries of each of the block's tokens, group-major: [B, H, G x block, D]. Never more scores than
    one block against one block, and only the blocks on and below the diagonal are computed. ``linear`` is ALiBi's bias
    of the block's queries, whose places are their indices in the prompt.
    """
    token = jnp.tile(jnp.arange(block), q.shape[2] // block)[:, None]

    def body(j: Int[Array, ""], carry: Running) -> Running:
        kb = jax.lax.dynamic_slice_in_dim(k, j * block, block, axis=2)
        vb = jax.lax.dynamic_slice_in_dim(v, j * block, block, axis=2)
        place = j * block + jnp.arange(block)
        bias = None if linear is None else linear(place[None, None])
        return attend_block(carry, q, kb, vb, index * block + token >= place, scale=scale, bias=bias)

    return jax.lax.fori_loop(0, index + 1, body, running)
