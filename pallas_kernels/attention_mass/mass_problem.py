"""Inputs of every implementation, :class:`Problem` and :class:`Counting`, and their result :class:`Masses`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kept_tokens import Bias, KeptTokens
from pallas_kernels.softmax import LOG2E, NEG, NOTHING


class Masses(NamedTuple):
    """Attention mass of every key, per query head.

    Attributes:
      new: [B, H, G, T], the keys' masses.
      kept: [B, H, G, C], the kept tokens' masses; None without kept tokens.
    """

    new: Float[Array, "B H G T"]
    kept: Float[Array, "B H G C"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """Queries and keys, checked; see :mod:`pallas_kernels.attention_mass.api`."""

    q: Float[Array, "B H G N D"]
    k: Float[Array, "B H T D"]
    offset: Int[Array, " B"]
    scale: Float[Array, " B"]
    kept: KeptTokens | None
    bias: Bias | None = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counting:
    """Normalisers and weights of the queries, and the masses that theirs are added to."""

    lse: Float[Array, "B H G N"]
    weight: Float[Array, "B N"] | None
    onto: Masses | None

    def of(self, queries: slice) -> Counting:
        """The same for a slice of the queries."""
        weight = None if self.weight is None else self.weight[:, queries]
        return dataclasses.replace(self, lse=self.lse[..., queries], weight=weight)


def log2_normaliser(lse: Float[Array, "B H G N"], weight: Float[Array, "B N"]) -> Float[Array, "B H G N"]:
    """The number to subtract from a score, in units of log 2, so that ``exp2`` gives the query's weighted attention.

    ``w exp(s - lse) = exp(s - (lse - log w))``; infinite (``-NEG``) for a query without weight or visible keys.
    """
    log_weight = jnp.log(jnp.maximum(weight, jnp.finfo(jnp.float32).tiny))[:, None, None]
    counts = (weight[:, None, None] > 0) & (lse > NOTHING)
    return jnp.where(counts, (lse - log_weight) * jnp.float32(LOG2E), jnp.float32(-NEG))
