"""Attention of several rows' queries over keys and values that they share, read once for all of them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import argument_checks
from pallas_kernels.kept_tokens import Bias, KeptTokens
from pallas_kernels.prefill import native, xla
from pallas_kernels.prefill.prefill_problem import Prefilled, Problem
from pallas_kernels.softmax import merge


def with_shared(
    p: Problem, own: Prefilled, shared: KeptTokens, bias: Bias | None, implementation: str | None = None
) -> Prefilled:
    """Attention over a chunk's own keys, merged with attention over the shared tokens.

    As kept tokens, these are attended to in XLA on accelerators: every query sees all of them, nothing is causal.

    Args:
      shared: with a batch of 1. bias: of [1, H, G B N, S] scores, queries by group, then row, then token.
    """
    batch, heads, group, count, dim = p.q.shape
    q = p.q.transpose(1, 2, 0, 3, 4).reshape(1, heads, group * batch * count, dim)
    out, lse = _alone(p, q, shared, bias, implementation)

    def by_row(x: Array) -> Float[Array, "B H G N *D"]:
        split = x.reshape(heads, group, batch, count, *x.shape[3:])
        return split.transpose(2, 0, 1, *range(3, split.ndim))

    found, mass = merge(own.out, own.lse, by_row(out), by_row(lse))
    return Prefilled(found.astype(own.out.dtype), mass)


def _alone(
    p: Problem, q: Float[Array, "1 H N D"], shared: KeptTokens, bias: Bias | None, implementation: str | None
) -> tuple[Array, Array]:
    """Attention of all rows' queries over the shared tokens: XLA's form where another than the CPU's is named."""
    nothing = jnp.zeros((1, q.shape[1], 0, q.shape[3]), p.k.dtype)
    given = {
        "q": q[:, :, None].astype(jnp.float32),
        "k": nothing,
        "v": nothing,
        "offset": jnp.int32(0),
        "length": None,
        "kept": shared,
    }
    try:
        if implementation not in (None, "native"):
            raise NotImplementedError(implementation)
        found = native.prefill(dataclasses.replace(p, **given, bias=bias))
    except NotImplementedError:
        return xla.attend_alone(q, shared, scale=p.scale, bias=bias, soft_cap=p.soft_cap)
    return found.out[:, :, 0], found.lse[:, :, 0]


def check(p: Problem, shared: KeptTokens, bias: Bias | None) -> None:
    """Raise ``ValueError`` where shared tokens do not fit the queries, or lack the positions that a bias needs."""
    _, heads, _, _, dim = p.q.shape
    argument_checks.kept_tokens(shared, 1, heads, dim)
    if (bias is None) != (shared.position is None):
        raise ValueError("shared_bias needs shared.position, and nothing else does.")
