"""What is asked, in one value: every implementation takes a :class:`Problem`, and for masses a :class:`Counting`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.rows import Bias, Rows


class Masses(NamedTuple):
    """Attention mass of every key, the query heads of a group apart.

    Attributes:
      new: [B, H, G, T] of the keys.
      kept: [B, H, G, C] of the kept rows; None where there are none.
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
    kept: Rows | None
    bias: Bias | None = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counting:
    """How queries are counted, and what is added to."""

    lse: Float[Array, "B H G N"]
    weight: Float[Array, "B N"] | None
    onto: Masses | None

    def of(self, queries: slice) -> Counting:
        """Of some of the queries."""
        weight = None if self.weight is None else self.weight[:, queries]
        return dataclasses.replace(self, lse=self.lse[..., queries], weight=weight)
