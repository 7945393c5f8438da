"""Attention of several rows' queries over one pool that they share, read once for all of them.

A row's queries are further query heads of the pool's KV heads, so every form takes them as they are: queries
[B, H, G, D] of B rows become [1, H, B G, D] of one. Kernels keep a head's queries and sums in registers or in shared
memory, so they are given at most ``QUERIES`` of a head at a time, and read the pool once for each such piece.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import argument_checks, dispatch
from pallas_kernels.pages import Pages
from pallas_kernels.ragged_decode.decode_problem import Decoded, Problem
from pallas_kernels.softmax import merge

#: Most queries of a head at a time: one product of the Mosaic GPU kernel, half of what the Triton kernel takes.
QUERIES = 64


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pages", "length", "position", "starts", "k_scale", "v_scale"],
    meta_fields=["runs", "part"],
)
@dataclasses.dataclass(frozen=True)
class Shared:
    """A pool of one row whose slots come before those of every row of the queries.

    Attributes:
      pages: with a batch of 1. length: int32, valid slots of each head; 0 is allowed.
      runs: pages of each head, static; with ``starts`` the most that each may have.
      position: int32, position of the token in each slot, where slopes are given.
      starts, k_scale, v_scale: as :func:`~pallas_kernels.ragged_decode.ragged_decode` takes them of the rows' own.
      part: likewise, static.
    """

    pages: Pages
    length: Int[Array, "1 H"]
    runs: tuple[int, ...]
    position: Int[Array, "1 P R"] | None = None
    starts: Int[Array, "1 H"] | None = None
    k_scale: Float[Array, "1 H K"] | None = None
    v_scale: Float[Array, "1 P R"] | None = None
    part: bool = False


def with_shared(run: Callable[[Problem], Decoded], own: Problem, shared: Shared, queries: int | None = None) -> Decoded:
    """``run`` on a problem, merged with it on the pool that its rows share; logits are those of the rows' own slots.

    ``queries``: the most of a head at a time; by default all of them on a CPU, whose form keeps nothing of a query.
    """
    if queries is None:
        queries = own.q.shape[0] * own.q.shape[2] if dispatch.platform() == "cpu" else QUERIES
    mine = run(own)
    theirs = [_over(run, own, shared, rows) for rows in _pieces(own, queries)]
    out, lse = (jnp.concatenate(parts, axis=0) for parts in zip(*theirs, strict=True))
    out, lse = merge(mine.out, mine.lse, out, lse)
    return Decoded(out.astype(mine.out.dtype), lse, mine.logits)


def check(own: Problem, shared: Shared) -> None:
    """Raise ``ValueError`` where a shared pool does not fit the queries, or their options do not reach it."""
    if not isinstance(shared.pages, Pages):
        raise ValueError(f"shared.pages are of type {type(shared.pages).__name__}; give Columns, Stacked or Lanes.")
    heads, dim = own.q.shape[1], own.pages.shape[3]
    batch, total, page_size, found = shared.pages.shape
    same = found == dim and shared.pages.key_dim == own.pages.key_dim
    covered = sum(shared.runs) == total
    if shared.starts is not None:
        covered = max(shared.runs) <= total and (shared.part or total <= sum(shared.runs))
    if batch != 1 or not same or len(shared.runs) != heads or not covered:
        raise ValueError(
            f"shared.pages are {batch} rows of {total} pages of {found} channels, its runs {shared.runs}; give one row "
            f"with runs of {heads} heads of {dim} channels."
        )
    if not jnp.issubdtype(shared.pages.dtype, jnp.floating) and shared.pages.dtype != jnp.int8:
        raise ValueError(f"shared.pages are {shared.pages.dtype}; give floats or int8.")
    argument_checks.array("shared.length", shared.length, (1, heads), argument_checks.INTEGER)
    by_slot = (1, total, page_size)
    whole = {"shared.position": (shared.position, by_slot), "shared.starts": (shared.starts, (1, heads))}
    argument_checks.arrays(argument_checks.INTEGER, **whole)
    scales = {
        "shared.k_scale": (shared.k_scale, (1, heads, shared.pages.key_dim)),
        "shared.v_scale": (shared.v_scale, by_slot),
    }
    argument_checks.arrays(argument_checks.FLOAT, **scales)
    if own.window is not None:
        raise ValueError("A window counts a row's own slots; give none with shared pages.")
    if (own.slopes is not None) != (shared.position is not None):
        raise ValueError("slopes need shared.position, and nothing else does.")


def _pieces(own: Problem, queries: int) -> list[slice]:
    """The rows that are taken together."""
    rows, group = own.q.shape[0], own.q.shape[2]
    size = max(queries // group, 1)
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


def _over(
    run: Callable[[Problem], Decoded], own: Problem, shared: Shared, rows: slice
) -> tuple[Float[Array, "B H G D"], Float[Array, "B H G"]]:
    """Some rows' attention over the shared pool alone, and its log-sum-exp."""
    q = own.q[rows]
    count, heads, group, dim = q.shape
    # ALiBi's bias counts from each row's position; all are given the last one's, and what that changes of a row's
    # scores is the same for every slot: it is added to its log-sum-exp.
    position = None if own.query_position is None or own.slopes is None else own.query_position[rows]
    last = None if position is None else position.max()
    problem = dataclasses.replace(
        own,
        q=q.swapaxes(0, 1).reshape(1, heads, count * group, dim),
        pages=shared.pages,
        length=shared.length,
        runs=shared.runs,
        starts=shared.starts,
        part=shared.part,
        log_mass=None,
        k_scale=shared.k_scale,
        v_scale=shared.v_scale,
        slopes=None if own.slopes is None else np.tile(own.slopes, (1, count)),
        position=shared.position,
        query_position=None if last is None else last[None],
        with_logits=False,
        logits_scale=None,
        first_row=None,
    )
    found = run(problem)
    out = found.out.reshape(heads, count, group, -1).swapaxes(0, 1)
    lse = found.lse.reshape(heads, count, group).swapaxes(0, 1)
    if last is not None and position is not None:
        behind = (last - position).astype(jnp.float32)
        lse = lse + jnp.asarray(own.slopes) * behind[:, None, None]
    return out, lse
