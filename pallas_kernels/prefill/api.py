"""``prefill``: causal attention of a chunk of queries, wherever in the prompt the chunk is."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import checks, dispatch
from pallas_kernels.prefill.prefill_problem import Prefilled, Problem
from pallas_kernels.rows import Bias, Rows

#: Keys that the XLA form reads at once, where the caller does not say.
BLOCK = 256


IMPLEMENTATIONS = dispatch.Implementations(
    "prefill", "pallas_kernels.prefill", "prefill", {"tpu": ("tpu",), "gpu": ("triton",)}
)


def prefill(
    q: Float[Array, "B H G N D"],
    k: Float[Array, "B H T D"],
    v: Float[Array, "B H T D"],
    *,
    offset: Int[Array, ""] | Int[Array, " B"] | int,
    scale: float,
    length: Int[Array, " B"] | None = None,
    kept: Rows | None = None,
    bias: Bias | None = None,
    block: int | None = None,
    implementation: str | None = None,
    **options: Any,
) -> Prefilled:
    """Softmax attention of a chunk of queries over the kept rows and the keys up to each query's own.

    The score of query i and key j, ``j <= offset + i``, is ``scale q_i . k_j + bias``; of a valid kept row the same,
    with its log mass.

    Args:
      q: after rotary, grouped by KV head. k, v: of everything from the prompt's start, the chunk's own included; what
        no query sees must be finite.
      offset: int32, the index of the chunk's query 0 among the keys, of each row or of all. Traced, so a chunk's place
        does not recompile. Negative where a row is shorter than N: queries at negative places see no key, and where
        there are no kept rows either their output is 0 and their log-sum-exp ``NEG``.
      scale: multiplies q . k.
      length: int32, the chunk's real queries in each row, for kernels to leave out blocks of padding; all if None.
      kept: rows from before, seen by all queries; their block size is their own.
      bias: of some keys' places; group-major queries. None, as for every model without ALiBi, is what kernels can do.
      block: keys the XLA form reads at once; divides T.
      implementation: the only one to try; by default the platform's in order, "xla" last.
      options: of one implementation: ``config`` (block sizes), ``interpret``.

    Raises:
      ValueError: an argument of another shape or type, or some that do not belong together.
      NotImplementedError: the implementation that was named cannot do this.
    """
    checks.array("q", q, (None,) * 5, checks.FLOAT)
    batch, heads, _, _, dim = q.shape
    checks.array("k", k, (batch, heads, None, dim), checks.FLOAT)
    tokens = k.shape[2]
    checks.array("v", v, (batch, heads, tokens, dim), checks.FLOAT)
    checks.sizes(q, tokens)
    checks.per_row("offset", offset, batch, checks.INTEGER)
    checks.arrays(checks.INTEGER, length=(length, (batch,)))
    checks.number("scale", scale)
    checks.rows(kept, batch, heads, dim)
    block = checks.block(block, tokens, BLOCK)
    problem = Problem(q, k, v, jnp.asarray(offset, jnp.int32), length, kept, checks.plain(scale), bias, block)
    return IMPLEMENTATIONS.run(implementation, problem, **options)
