"""The signals a policy declares, computed beside prefill's attention: block by block, never a T x T matrix.

The mass of a window of queries needs two passes over the keys for those few queries: one for the normaliser, one for
the sum. Column sums need one more product of queries and keys for the whole prompt, because a query's normaliser is
known only once it has met all its keys.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention import NEG, KeptRows
from kvjax.config import ModelConfig
from kvjax.model.alibi import QueryBias, query_bias
from kvjax.model.decoder import DecoderLayer
from kvjax.model.rope import Angles, rotated
from kvjax.policies.base import Policy
from kvjax.policies.signals import Mass, PromptSignals, QueryStats, Signals, first_window_query


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Taps:
    """What is accumulated over the query blocks of one layer; None where a policy did not ask.

    Attributes:
      columns: mass of every key over all queries so far.
      stats: of the queries so far, before rotary embedding.
    """

    columns: Mass | None
    stats: QueryStats | None


@dataclasses.dataclass(frozen=True)
class LayerTap:
    """What one policy asks of every layer, for rows of these lengths.

    Attributes:
      signals: declared by the policy.
      count: [B] new tokens of each row; seen: [B] tokens before them.
      first: [B] the first new token in the window. window_rows: tokens in the longest window, static.
      scale: [B] of the window's softmax.
    """

    signals: Signals
    config: ModelConfig
    seen: Int[Array, " B"]
    count: Int[Array, " B"]
    first: Int[Array, " B"]
    scale: Float[Array, " B"]
    window_rows: int

    def window_queries(
        self, layer: DecoderLayer, x: Float[Array, "B T M"], turn: Angles
    ) -> tuple[Float[Array, "B H N D"], Int[Array, "B N"], Bool[Array, "B N"]] | None:
        """The window's queries, scaled and group-major, the token each belongs to, and which of them there are.

        Taken from the hidden states before the layer runs over them.
        """
        if not self.window_rows:
            return None
        token = self.count[:, None] - self.window_rows + jnp.arange(self.window_rows)
        there = token >= self.first[:, None]
        token = jnp.maximum(token, 0)
        xw, here = jax.tree.map(lambda a: jnp.take_along_axis(a, token[..., None], axis=1), (x, turn))
        q, _, _ = layer.project(xw)
        q = rotated(q, here).transpose(0, 2, 3, 1, 4)
        group = q.shape[2]
        q = q.reshape(*q.shape[:2], -1, q.shape[-1]).astype(jnp.float32) * self.scale[:, None, None, None]
        return q, jnp.tile(token, (1, group)), jnp.tile(there, (1, group))

    def start(self, kept: KeptRows | None, tokens: int) -> Taps:
        """Taps that have seen no query."""
        c, s = self.config, self.signals
        batch = self.count.shape[0]
        stats = QueryStats.none(batch, c.num_kv_heads, c.group_size, c.head_dim) if s.queries else None
        return Taps(self._no_mass(kept, tokens) if s.columns else None, stats)

    def _no_mass(self, kept: KeptRows | None, tokens: int) -> Mass:
        shape = (self.count.shape[0], self.config.num_kv_heads, self.config.group_size)
        slots = None if kept is None else jnp.zeros((*shape, kept.k.shape[2]), jnp.float32)
        return Mass(slots, jnp.zeros((*shape, tokens), jnp.float32))

    def after_block(
        self,
        taps: Taps,
        raw: Float[Array, "B S H G D"],
        q: Float[Array, "B H N D"],
        normaliser: Float[Array, "B H N"],
        k: Float[Array, "B H T D"],
        kept: KeptRows | None,
        index: Int[Array, ""],
    ) -> Taps:
        """Taps after one block of queries: ``raw`` before rotary, ``q`` after it, with their log-sum-exp."""
        s, block, group = self.signals, raw.shape[1], self.config.group_size
        token = index * block + jnp.arange(block)
        real = token < self.count[:, None]
        columns, stats = taps.columns, taps.stats
        if columns is not None:
            last = jnp.broadcast_to(jnp.tile(token, group), (q.shape[0], q.shape[2]))
            scale = jnp.full_like(self.scale, self.config.head_dim**-0.5)
            if s.columns_scaled:
                scale = self.scale
            scaled = q.astype(jnp.float32) * scale[:, None, None, None]
            linear = query_bias(self.config, last)
            if s.columns_scaled:
                normaliser = log_normaliser(scaled, last, k, kept, index + 1, block, linear)
            counted = jnp.tile(real, (1, group))
            columns = add_mass(columns, scaled, normaliser, counted, last, k, kept, index + 1, block, linear)
        if stats is not None:
            counts = real & (self.seen[:, None] + token >= s.query_skip)
            stats = stats.merge(stats_of(raw, counts))
        return Taps(columns, stats)

    def finish(
        self,
        taps: Taps,
        window: tuple[Array, Array, Array] | None,
        k: Float[Array, "B H T D"],
        kept: KeptRows | None,
        blocks: Int[Array, ""],
        block: int,
    ) -> PromptSignals:
        """The layer's signals, once all its keys are there."""
        mass = None
        if window is not None:
            q, last, there = window
            linear = query_bias(self.config, last)
            normaliser = log_normaliser(q, last, k, kept, blocks, block, linear)
            empty = self._no_mass(kept, k.shape[2])
            mass = add_mass(empty, q, normaliser, there, last, k, kept, blocks, block, linear)
        return PromptSignals(mass, taps.columns, taps.stats)


def layer_tap(
    policy: Policy,
    config: ModelConfig,
    seen: Int[Array, " B"],
    count: Int[Array, " B"],
    total: Int[Array, " B"],
    tokens: int,
    fresh: bool,
) -> LayerTap | None:
    """What the policy asks of each layer, for rows of at most ``tokens`` new tokens; None when that is nothing."""
    signals = policy.signals
    # A share is of all the tokens a row has seen: on a later turn that can be the whole of its new ones.
    seen_at_most = tokens if fresh else max(tokens, config.max_position)
    rows = min(tokens, signals.window_rows(seen_at_most)) if signals.window or signals.window_share else 0
    if not (rows or signals.columns or signals.queries):
        return None
    first = first_window_query(signals, count, seen + count)
    return LayerTap(signals, config, seen, count, first, policy.window_scale(config, total), rows)


def stats_of(q: Float[Array, "B N H G D"], counts: Bool[Array, "B N"]) -> QueryStats:
    """Statistics of one block of queries, of those that count."""
    weight = counts.astype(jnp.float32)
    count = weight.sum(axis=1)
    share = weight / jnp.maximum(count, 1)[:, None]
    wide = q.astype(jnp.float32)
    mean = jnp.einsum("bn,bnhgd->bhgd", share, wide, precision=jax.lax.Precision.HIGHEST)
    centred = wide - mean[:, None]
    covariance = jnp.einsum(
        "bn,bnhgd,bnhge->bhgde", share, centred, centred, precision=jax.lax.Precision.HIGHEST, optimize="optimal"
    )
    return QueryStats(count, mean, covariance)


def log_normaliser(
    q: Float[Array, "B H N D"],
    last: Int[Array, "B N"],
    k: Float[Array, "B H T D"],
    kept: KeptRows | None,
    blocks: Int[Array, ""],
    block: int,
    linear: QueryBias | None = None,
) -> Float[Array, "B H N"]:
    """Log-sum-exp of each query's scores over the kept slots and the new keys up to its ``last``.

    Args:
      q: queries after rotary, multiplied by their scale.
      last: the last new key each query sees.
      k: the new keys. kept: the slots from before.
      blocks: how many blocks of ``block`` new keys there are to visit.
      linear: ALiBi's bias of queries whose places are ``last``.
    """

    def fold(carry: tuple[Array, Array], scores: Array) -> tuple[Array, Array]:
        peak, mass = carry
        higher = jnp.maximum(peak, scores.max(axis=-1))
        weight = jnp.where(scores > NEG, jnp.exp(scores - higher[..., None]), 0.0)
        return higher, mass * jnp.exp(peak - higher) + weight.sum(axis=-1)

    empty = jnp.zeros(q.shape[:3], jnp.float32)
    carry = (empty + NEG, empty)
    if kept is not None:
        carry = jax.lax.fori_loop(0, kept.blocks, lambda i, c: fold(c, _kept_scores(q, kept, i, linear)), carry)
    carry = jax.lax.fori_loop(0, blocks, lambda i, c: fold(c, _new_scores(q, last, k, i, block, linear)), carry)
    return carry[0] + jnp.log(jnp.maximum(carry[1], jnp.finfo(jnp.float32).tiny))


def add_mass(
    total: Mass,
    q: Float[Array, "B H N D"],
    normaliser: Float[Array, "B H N"],
    counted: Bool[Array, "B N"],
    last: Int[Array, "B N"],
    k: Float[Array, "B H T D"],
    kept: KeptRows | None,
    blocks: Int[Array, ""],
    block: int,
    linear: QueryBias | None = None,
) -> Mass:
    """``total`` with the attention of these queries added, those that are ``counted``; see :func:`log_normaliser`.

    Queries are group-major: the first N / G belong to the first query head of the group.
    """
    group = total.new.shape[2]
    weight_of = jnp.where(counted, 0.0, NEG)[:, None, :, None]

    def gained(scores: Array) -> Array:
        # A normaliser is at least as large as any of its scores, up to rounding.
        weight = jnp.exp(jnp.minimum(scores - normaliser[..., None], 0.0) + weight_of)
        return weight.reshape(*weight.shape[:2], group, -1, weight.shape[3]).sum(axis=3)

    def over_new(i: Int[Array, ""], mass: Array) -> Array:
        return _add_at(mass, gained(_new_scores(q, last, k, i, block, linear)), i * block)

    new = jax.lax.fori_loop(0, blocks, over_new, total.new)
    if kept is None or total.kept is None:
        return Mass(total.kept, new)

    def over_kept(i: Int[Array, ""], mass: Array) -> Array:
        return _add_at(mass, gained(_kept_scores(q, kept, i, linear)), i * kept.block)

    return Mass(jax.lax.fori_loop(0, kept.blocks, over_kept, total.kept), new)


def _new_scores(q: Array, last: Array, k: Array, i: Int[Array, ""], block: int, linear: QueryBias | None) -> Array:
    """[B, H, N, S] scores of one block of new keys, NEG where they are not visible."""
    kb = jax.lax.dynamic_slice_in_dim(k, i * block, block, axis=2)
    scores = jnp.einsum("bhnd,bhsd->bhns", q, kb, preferred_element_type=jnp.float32)
    place = i * block + jnp.arange(block)
    if linear is not None:
        scores = scores + linear(place[None, None])
    return jnp.where((place <= last[..., None])[:, None], scores, NEG)


def _kept_scores(q: Array, kept: KeptRows, i: Int[Array, ""], linear: QueryBias | None) -> Array:
    """[B, H, N, S] scores of one block of kept slots, NEG where they are not valid."""
    kb, _, visible, bias = kept.block_of(i, linear)
    scores = jnp.einsum("bhnd,bhsd->bhns", q, kb, preferred_element_type=jnp.float32)
    if bias is not None:
        scores = scores + bias
    return jnp.where(visible, scores, NEG)


def _add_at(total: Array, part: Array, start: Array) -> Array:
    """``total`` with ``part`` added from ``start`` on, along the last axis."""
    here = jax.lax.dynamic_slice_in_dim(total, start, part.shape[-1], axis=total.ndim - 1)
    return jax.lax.dynamic_update_slice_in_dim(total, here + part, start, axis=total.ndim - 1)
