"""``prefill``: causal attention of a chunk of queries at any place in the prompt."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import argument_checks, dispatch
from pallas_kernels.kept_tokens import Bias, KeptTokens
from pallas_kernels.prefill import shared as sharing
from pallas_kernels.prefill.prefill_problem import Prefilled, Problem

#: Keys that the XLA form reads at once by default.
BLOCK = 256


IMPLEMENTATIONS = dispatch.Implementations(
    "prefill", "pallas_kernels.prefill", "prefill", {"cpu": ("native",), "tpu": ("tpu",), "gpu": ("triton",)}
)


def prefill(
    q: Float[Array, "B H G N D"],
    k: Float[Array, "B H T D"],
    v: Float[Array, "B H T D"],
    *,
    offset: Int[Array, ""] | Int[Array, " B"] | int,
    scale: float,
    length: Int[Array, " B"] | None = None,
    kept: KeptTokens | None = None,
    bias: Bias | None = None,
    shared: KeptTokens | None = None,
    shared_bias: Bias | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    block: int | None = None,
    implementation: str | None = None,
    **options: Any,
) -> Prefilled:
    """Softmax attention of a chunk of queries over the kept tokens and the keys up to each query's own.

    The score of query i and key j, ``j <= offset + i``, is ``cap(scale q_i . k_j) + bias``; kept tokens are scored the
    same way, plus their log mass. ``cap(x) = soft_cap * tanh(x / soft_cap)``.

    Args:
      q: after rotary embedding, grouped by KV head. k, v: from the prompt's start, the chunk's own included; finite
        everywhere, also where no query attends.
      offset: int32, the index of the chunk's query 0 among the keys, of each row or of all. Traced, so another offset
        compiles nothing. Negative where a row is shorter than N: queries at negative positions attend to no key, and
        without kept tokens their output is 0 and their log-sum-exp ``NEG``.
      scale: multiplies q . k.
      length: int32, the chunk's real queries in each row, so that kernels skip blocks of padding; all if None.
      kept: keys and values of earlier tokens, which all queries attend to; they have a block size of their own.
      bias: bias of scores by key positions (ALiBi), for group-major queries. Only "xla" takes one.
      shared: rows, of a batch of 1, that the queries of all rows attend to as well, merged by log-sum-exp.
      shared_bias: bias of scores by the shared tokens' positions, for queries by group, then row, then token.
      window: attend only to the last ``window`` tokens, the query's own included; kept tokens are then those of the
        tokens right before the first key, in order, and nothing is shared.
      soft_cap: bound of the scores.
      block: keys the XLA form reads at once; divides T.
      implementation: the only one to try; by default the platform's in order, "xla" last, which alone has derivatives.
      options: options of the implementation that is named: ``config`` (block sizes), ``interpret``.

    Raises:
      ValueError: an argument of another shape or type, or some that contradict each other.
      NotImplementedError: the implementation that was named cannot do this.
    """
    argument_checks.array("q", q, (None,) * 5, argument_checks.FLOAT)
    batch, heads, _, _, dim = q.shape
    argument_checks.array("k", k, (batch, heads, None, dim), argument_checks.FLOAT)
    tokens = k.shape[2]
    argument_checks.array("v", v, (batch, heads, tokens, dim), argument_checks.FLOAT)
    argument_checks.sizes(q, tokens)
    argument_checks.per_row("offset", offset, batch, argument_checks.INTEGER)
    argument_checks.arrays(argument_checks.INTEGER, length=(length, (batch,)))
    argument_checks.number("scale", scale)
    argument_checks.kept_tokens(kept, batch, heads, dim)
    block = argument_checks.block(block, tokens, BLOCK)
    argument_checks.bounds(window, soft_cap)
    bounds = window, argument_checks.plain(soft_cap)
    problem = Problem(
        q, k, v, jnp.asarray(offset, jnp.int32), length, kept, argument_checks.plain(scale), bias, block, *bounds
    )
    if shared is not None:
        if window is not None:
            raise ValueError("A window counts a row's own tokens; give none with shared tokens.")
        sharing.check(problem, shared, shared_bias)
    found = IMPLEMENTATIONS.run(implementation, problem, **options)
    return found if shared is None else sharing.with_shared(problem, found, shared, shared_bias, implementation)
