"""Attention of several rows' queries over rows of keys and values that they share, read once for all of them."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels import argument_checks
from pallas_kernels.prefill import xla
from pallas_kernels.prefill.prefill_problem import Prefilled, Problem
from pallas_kernels.rows import Bias, Rows
from pallas_kernels.softmax import merge


def with_shared(p: Problem, own: Prefilled, shared: Rows, bias: Bias | None) -> Prefilled:
    """Attention over a chunk's own keys, merged with attention over the shared rows.

    As kept rows, these are attended to in XLA whatever the form: every query sees all of them, nothing is causal.

    Args:
      shared: with a batch of 1. bias: of [1, H, G B N, S] scores, queries by group, then row, then token.
    """
    batch, heads, group, count, dim = p.q.shape
    q = p.q.transpose(1, 2, 0, 3, 4).reshape(1, heads, group * batch * count, dim)
    out, lse = xla.attend_alone(q, shared, scale=p.scale, bias=bias, soft_cap=p.soft_cap)

    def by_row(x: Array) -> Float[Array, "B H G N *D"]:
        split = x.reshape(heads, group, batch, count, *x.shape[3:])
        return split.transpose(2, 0, 1, *range(3, split.ndim))

    found, mass = merge(own.out, own.lse, by_row(out), by_row(lse))
    return Prefilled(found.astype(own.out.dtype), mass)


def check(p: Problem, shared: Rows, bias: Bias | None) -> None:
    """Raise ``ValueError`` where shared rows do not fit the queries, or lack the positions that a bias needs."""
    _, heads, _, _, dim = p.q.shape
    argument_checks.rows(shared, 1, heads, dim)
    if (bias is None) != (shared.place is None):
        raise ValueError("shared_bias needs shared.place, and nothing else does.")
