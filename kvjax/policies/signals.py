"""The statistics of attention that a policy may ask for."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Signals:
    """The statistics of attention that a policy needs; what is not declared is never computed.

    Attributes:
      window: queries at the end of each prompt or turn whose attention every key's mass is summed over.
      window_share: the same as a fraction of the tokens seen by then, rounded up; the larger of the two counts.
      columns: mass of every key over all queries of the prompt or turn.
      columns_scaled: the columns' softmax uses :meth:`Policy.window_scale` instead of the model's own scale.
      queries: mean and covariance of the queries before rotary embedding.
      query_skip: tokens at positions below this do not count among them.
      decode_logits: :meth:`Policy.observe` gets each new query's scaled scores by page.
    """

    window: int = 0
    window_share: float = 0.0
    columns: bool = False
    columns_scaled: bool = False
    queries: bool = False
    query_skip: int = 0
    decode_logits: bool = False

    def window_rows(self, tokens: int) -> int:
        """The most queries a window of ``tokens`` tokens can hold: a static size."""
        return min(tokens, max(self.window, _share(self.window_share, tokens)))


def _share(share: float, tokens: int) -> int:
    return -int(-share * tokens // 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mass:
    """Attention mass of each key, the query heads of a group apart.

    Attributes:
      kept: [B, H, G, C] of the slots that were in the cache; None in a fresh one.
      new: [B, H, G, T] of the tokens being read.
    """

    kept: Float[Array, "B H G C"] | None
    new: Float[Array, "B H G T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryStats:
    """Queries before rotary embedding, float32.

    Attributes:
      count: [B] queries.
      mean: [B, H, G, D]; covariance: [B, H, G, D, D], divided by the count.
    """

    count: Float[Array, " B"]
    mean: Float[Array, "B H G D"]
    covariance: Float[Array, "B H G D D"]

    @classmethod
    def none(cls, batch: int, heads: int, group: int, dim: int) -> QueryStats:
        """Statistics of no query."""
        zeros = jnp.zeros((batch, heads, group, dim), jnp.float32)
        return cls(jnp.zeros((batch,), jnp.float32), zeros, jnp.zeros((*zeros.shape, dim), jnp.float32))

    def merge(self, other: QueryStats) -> QueryStats:
        """Statistics of both sets together (Chan et al.'s update: no cancellation of large means)."""
        count = self.count + other.count
        share = (other.count / jnp.maximum(count, 1))[:, None, None, None]
        delta = other.mean - self.mean
        mean = self.mean + share * delta
        outer = delta[..., :, None] * delta[..., None, :]
        share = share[..., None]
        covariance = (1 - share) * self.covariance + share * other.covariance + share * (1 - share) * outer
        return QueryStats(count, mean, covariance)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptSignals:
    """The declared signals of a prompt or turn, in the layer's tokens; see :class:`Signals`. The rest is None."""

    window: Mass | None = None
    columns: Mass | None = None
    queries: QueryStats | None = None

    def of_heads(self, heads: tuple[int, ...]) -> PromptSignals:
        """The signals of some of the KV heads."""
        index = jnp.asarray(heads, jnp.int32)

        def cut(mass: Mass | None) -> Mass | None:
            if mass is None:
                return None
            return Mass(None if mass.kept is None else mass.kept[:, index], mass.new[:, index])

        stats = self.queries
        if stats is not None:
            stats = QueryStats(stats.count, stats.mean[:, index], stats.covariance[:, index])
        return PromptSignals(cut(self.window), cut(self.columns), stats)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CandidateSignals:
    """:class:`PromptSignals` in the order of a selection's candidates: [B, H, G, N] masses."""

    window: Float[Array, "B H G N"] | None = None
    columns: Float[Array, "B H G N"] | None = None
    queries: QueryStats | None = None


def first_window_query(signals: Signals, count: Int[Array, " B"], total: Int[Array, " B"]) -> Int[Array, " B"]:
    """[B] index among the new tokens of the first query in each row's window."""
    wanted = jnp.maximum(signals.window, jnp.ceil(jnp.float32(signals.window_share) * total - 1e-3).astype(jnp.int32))
    return jnp.maximum(count - wanted, 0)
