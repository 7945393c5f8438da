"""The signals a policy declares, computed beside prefill's attention: block by block, never a T x T matrix.

The mass of a window of queries needs two passes over the keys for those few queries: one for the normaliser, one for
the sum. Column sums need one more product of queries and keys for the whole prompt, because a query's normaliser is
known only once it has met all its keys. Both are :mod:`pallas_kernels.attention_mass`.

Where a head's softmax has a sink, a logit without a key (gpt-oss), the normaliser is that of the model's own
attention, ``logaddexp(lse, sink)``: a key's mass is what it brings to the model's result, a query's masses sum to less
than 1, and a query that mostly attends to the sink counts little. A softmax of another scale has its sink scaled alike,
since all of its logits are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.buckets import block_of, keys_of
from kvjax.model.alibi import query_bias
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import DecoderLayer
from kvjax.model.rope import Angles, apply_rope
from kvjax.policies.base import Policy
from kvjax.policies.signals import Mass, PromptSignals, QueryStats, Signals, first_window_query
from kvjax.runtime.layer_observer import LayerObserver
from pallas_kernels.attention_mass import Masses, attention_mass, log_sum_exp
from pallas_kernels.kept_tokens import KeptTokens
from pallas_kernels.softmax import NEG, capped, merge_log

#: What is taken before a layer runs: window queries with their places and weights, non-causal mass [B, H, G, T], what a
#: linear function gives [B, H, T], and mean squares [B, H, G, D].
Taken = tuple[tuple[Array, Array, Array] | None, Array | None, Array | None, Array | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialSignals:
    """Sums over the query blocks of one layer so far; None where a policy did not ask.

    Attributes:
      columns: mass of every key over all queries so far.
      stats: of the queries so far, before rotary embedding.
    """

    columns: Mass | None
    stats: QueryStats | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SignalCollector(LayerObserver):
    """Collects the signals that one policy asks of every layer, for rows of these lengths.

    Attributes:
      signals: declared by the policy.
      count: [B] new tokens of each row; seen: [B] tokens before them.
      first: [B] the first new token in the window. window_rows: tokens in the longest window, static.
      scale: [B] of the window's softmax.
      sink_logits: [B, H, G] of the layer's softmaxes, or None; rows that are read in turns take their own.
      asking: the policy that asks, and the layer's number as it counts, static; for ``hidden``.
    """

    signals: Signals = dataclasses.field(metadata={"static": True})
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    seen: Int[Array, " B"]
    count: Int[Array, " B"]
    first: Int[Array, " B"]
    scale: Float[Array, " B"]
    window_rows: int = dataclasses.field(metadata={"static": True})
    sink_logits: Float[Array, "B H G"] | None = None
    asking: tuple[Policy, int] | None = dataclasses.field(default=None, metadata={"static": True})

    def before_layer(self, layer: DecoderLayer, x: Float[Array, "B T M"], rope: Angles) -> Taken:
        """Signals computed from the layer's input before it runs: window queries, non-causal attention mass, what a
        linear function gives of the input, and the mean squares of the last queries.
        """
        s = self.signals
        noncausal = noncausal_mass(layer, x, rope, self.seen, self.count, s) if s.noncausal else None
        hidden = None
        if s.hidden and self.asking is not None:
            policy, number = self.asking
            weights = jnp.asarray(policy.hidden_weights(layer.exchange.whole(layer.config), number))
            hidden = hidden_scores(layer, x, layer.exchange.own_heads(weights))
        squares = mean_squares(layer, x, rope, self.count, s.squares) if s.squares else None
        return self._window(layer, x, rope), noncausal, hidden, squares

    def _window(
        self, layer: DecoderLayer, x: Float[Array, "B T M"], rope: Angles
    ) -> tuple[Float[Array, "B H G W D"], Int[Array, " B"], Float[Array, "B W"]] | None:
        """The window's queries, the token of the first (negative in a row shorter than the window), and how much each
        counts: 1, or as many as it has keys, and 0 where there is none.
        """
        if not self.window_rows:
            return None
        offset = self.count - self.window_rows
        token = offset[:, None] + jnp.arange(self.window_rows)
        xw, here = jax.tree.map(lambda a: jnp.take_along_axis(a, jnp.maximum(token, 0)[..., None], axis=1), (x, rope))
        q, _, _ = layer.project(xw)
        q = apply_rope(q, here).transpose(0, 2, 3, 1, 4)
        weight = (token >= self.first[:, None]).astype(jnp.float32)
        if self.signals.window_by_keys:
            weight = weight * (self.seen[:, None] + token + 1)
        return q, offset, weight

    def start(self, kept: KeptTokens | None, tokens: int) -> PartialSignals:
        """PartialSignals that have seen no query."""
        c, s = self.config, self.signals
        batch = self.count.shape[0]
        stats = QueryStats.none(batch, c.num_kv_heads, c.group_size, c.head_dim) if s.queries else None
        return PartialSignals(self._no_mass(kept, tokens) if s.columns else None, stats)

    def _no_mass(self, kept: KeptTokens | None, tokens: int) -> Mass:
        shape = (self.count.shape[0], self.config.num_kv_heads, self.config.group_size)
        slots = None if kept is None else jnp.zeros((*shape, kept.k.shape[2]), jnp.float32)
        return Mass(slots, jnp.zeros((*shape, tokens), jnp.float32))

    def after_block(
        self,
        partial: PartialSignals,
        raw: Float[Array, "B S H G D"],
        q: Float[Array, "B H G S D"],
        normaliser: Float[Array, "B H G S"],
        k: Float[Array, "B H T D"],
        kept: KeptTokens | None,
        index: Int[Array, ""],
    ) -> PartialSignals:
        """PartialSignals after one block of queries: ``raw`` before rotary, ``q`` after it, with their log-sum-exp."""
        s, block = self.signals, raw.shape[1]
        token = index * block + jnp.arange(block)
        real = token < self.count[:, None]
        columns, stats = partial.columns, partial.stats
        if columns is not None:
            where = self._where(index * block, block, kept, self.scale if s.columns_scaled else None, k.shape[2])
            if s.columns_scaled:
                normaliser = self._normaliser(q, k, where)
            onto = Masses(columns.new, columns.kept)
            found = attention_mass(q, k, normaliser, weight=real.astype(jnp.float32), onto=onto, **where)
            columns = Mass(found.kept, found.new)
        if stats is not None:
            counts = real & (self.seen[:, None] + token >= s.query_skip)
            stats = stats.merge(stats_of(raw, counts))
        return PartialSignals(columns, stats)

    def finish(
        self,
        partial: PartialSignals,
        taken: Taken,
        k: Float[Array, "B H T D"],
        kept: KeptTokens | None,
    ) -> PromptSignals:
        """The layer's signals, once all its keys are there."""
        mass, (window, noncausal, hidden, squares) = None, taken
        if window is not None:
            q, offset, weight = window
            where = self._where(offset, self.window_rows, kept, self.scale, k.shape[2])
            found = attention_mass(q, k, self._normaliser(q, k, where), weight=weight, **where)
            mass = Mass(found.kept, found.new)
        both = None if noncausal is None else Mass(None, noncausal)
        linear = None if hidden is None else Mass(None, hidden[:, :, None])
        return PromptSignals(mass, partial.columns, partial.stats, both, hidden=linear, squares=squares)

    def _normaliser(self, q: Array, k: Array, where: dict[str, Any]) -> Float[Array, "B H G N"]:
        """Log-sum-exp of each query's logits, its head's sink among them, in the softmax of the window's scale."""
        lse = log_sum_exp(q, k, **where)
        if self.sink_logits is None:
            return lse
        scaled = (self.scale / self.config.attention_scale)[:, None, None, None]
        return merge_log(lse, self.sink_logits[..., None] * scaled)

    def _where(
        self, offset: Int[Array, "*B"], queries: int, kept: KeptTokens | None, scale: Array | None, tokens: int
    ) -> dict[str, Any]:
        """The arguments that both passes share, for ``queries`` queries from this place on."""
        place = jnp.atleast_1d(offset)[:, None] + jnp.arange(queries)
        return dict(
            offset=offset,
            scale=self.config.attention_scale if scale is None else scale,
            soft_cap=self.config.attention_soft_cap,
            kept=kept,
            bias=query_bias(self.config, jnp.tile(place, (1, self.config.group_size))),
            block=keys_of(tokens),
        )


def signal_collector(
    policy: Policy,
    config: ModelConfig,
    seen: Int[Array, " B"],
    count: Int[Array, " B"],
    total: Int[Array, " B"],
    tokens: int,
    fresh: bool,
) -> SignalCollector | None:
    """The collector of a policy's signals, for rows of at most ``tokens`` new tokens; None where it asks for none."""
    signals = policy.signals
    # A share is of all the tokens a row has seen: on a later turn that can be the whole of its new ones.
    seen_at_most = tokens if fresh else max(tokens, config.max_position)
    rows = min(tokens, signals.window_rows(seen_at_most)) if signals.window or signals.window_share else 0
    if not (rows or signals.columns or signals.queries or signals.noncausal or signals.hidden or signals.squares):
        return None
    first = first_window_query(signals, count, seen + count)
    return SignalCollector(signals, config, seen, count, first, policy.window_scale(config, total), rows)


def hidden_scores(layer: DecoderLayer, x: Float[Array, "B T M"], weights: Float[Array, "H N"]) -> Float[Array, "B H T"]:
    """A linear function, for each KV head, of what the layer's projections of attention read; float32.

    ``weights`` are of its M channels, and last what is added. A block of tokens at a time: what is read of all would be
    as large as the hidden states are.
    """
    block = block_of(x.shape[1])

    def body(i: Int[Array, ""], done: Float[Array, "B H T"]) -> Float[Array, "B H T"]:
        read = layer.attention_input(jax.lax.dynamic_slice_in_dim(x, i * block, block, axis=1)).astype(jnp.float32)
        found = jnp.einsum("btm,hm->bht", read, weights[:, :-1], precision=jax.lax.Precision.HIGHEST)
        return jax.lax.dynamic_update_slice_in_dim(done, found + weights[:, -1:], i * block, axis=2)

    empty = jnp.zeros((x.shape[0], weights.shape[0], x.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, x.shape[1] // block, body, empty)


def mean_squares(
    layer: DecoderLayer, x: Float[Array, "B T M"], rope: Angles, count: Int[Array, " B"], window: int
) -> Float[Array, "B H G D"]:
    """Mean of each query channel's square, after rotary embedding, over each row's last ``window`` tokens; float32."""
    size = min(window, x.shape[1])
    token = count[:, None] - size + jnp.arange(size)
    xw, here = jax.tree.map(lambda a: jnp.take_along_axis(a, jnp.maximum(token, 0)[..., None], axis=1), (x, rope))
    q, _, _ = layer.project(xw)
    q = apply_rope(q, here).astype(jnp.float32)
    real = (token >= 0).astype(jnp.float32)
    total = jnp.einsum("bw,bwhgd->bhgd", real, q * q, precision=jax.lax.Precision.HIGHEST)
    return total / jnp.maximum(real.sum(axis=1), 1)[:, None, None, None]


def noncausal_mass(
    layer: DecoderLayer,
    x: Float[Array, "B T M"],
    rope: Angles,
    seen: Int[Array, " B"],
    count: Int[Array, " B"],
    signals: Signals,
) -> Float[Array, "B H G T"]:
    """Non-causal attention mass: what each key gets from all queries of its chunk; 1 for keys of no chunk.

    Chunks of ``signals.noncausal`` tokens begin at the position ``noncausal_first``, or with the row's first new token
    after it, and end before its last ``noncausal_last``. 1 is a whole chunk's mean; each query that a short one lacks
    adds 1 / its size, so that it is not lower there. ALiBi's biases, which are for earlier keys, are left out.
    """
    config, (batch, tokens, _), size = layer.config, x.shape, signals.noncausal
    scale = config.attention_scale if signals.noncausal_scaled else 1.0
    skip = jnp.maximum(signals.noncausal_first - seen, 0)
    end = count - skip - signals.noncausal_last
    exact = jax.lax.Precision.HIGHEST

    def chunk(i: Int[Array, ""], done: Float[Array, "B H G N"]) -> Float[Array, "B H G N"]:
        place = i * size + jnp.arange(size)
        source = jnp.minimum(skip[:, None] + place, tokens - 1)[..., None]
        xc, here = jax.tree.map(lambda a: jnp.take_along_axis(a, source, axis=1), (x, rope))
        raw_q, raw_k, _ = layer.project(xc)
        q, k = (apply_rope(a, here).astype(jnp.float32) for a in (raw_q, raw_k))
        logits = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, precision=exact) * scale
        logits = capped(logits, config.attention_soft_cap)
        real = place < end[:, None]
        weight = jax.nn.softmax(jnp.where(real[:, None, None, None], logits, NEG), axis=-1)
        lacking = (size - real.sum(axis=1))[:, None, None, None] / size
        mass = (weight * real[:, None, None, :, None]).sum(axis=3) + lacking
        return jax.lax.dynamic_update_slice_in_dim(done, mass, i * size, axis=3)

    chunks = -(-tokens // size)
    empty = jnp.zeros((batch, config.num_kv_heads, config.group_size, chunks * size), jnp.float32)
    empty = empty + 0 * skip[0].astype(jnp.float32)  # on a mesh it differs from device to device, as what is written
    mass = jax.lax.fori_loop(0, (jnp.max(end) + size - 1) // size, chunk, empty)
    place = jnp.arange(tokens) - skip[:, None]
    inside = (place >= 0) & (place < end[:, None])
    moved = jnp.take_along_axis(mass, jnp.maximum(place, 0)[:, None, None], axis=3)
    return jnp.where(inside[:, None, None], moved, 1.0)


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
