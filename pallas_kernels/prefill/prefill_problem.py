"""The input :class:`Problem` and the result :class:`Prefilled` of every implementation of ``prefill``."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.kept_tokens import Bias, KeptTokens


class Prefilled(NamedTuple):
    """Result of a chunk. Queries from a row's ``length`` on have finite results without meaning.

    Attributes:
      out: [B, H, G, N, D] in the queries' dtype.
      lse: [B, H, G, N] float32 log-sum-exp of the scores, by which partial results are merged.
    """

    out: Float[Array, "B H G N D"]
    lse: Float[Array, "B H G N"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of :func:`~pallas_kernels.prefill.api.prefill`, checked; see there."""

    q: Float[Array, "B H G N D"]
    k: Float[Array, "B H T D"]
    v: Float[Array, "B H T D"]
    offset: Int[Array, ""] | Int[Array, " B"]
    length: Int[Array, " B"] | None
    kept: KeptTokens | None
    scale: float = dataclasses.field(metadata={"static": True})
    bias: Bias | None = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
