"""``ragged_decode``: attention of one new token per row over a paged cache with heads of different lengths."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import argument_checks, dispatch
from pallas_kernels.pages import Pages
from pallas_kernels.ragged_decode import shared as sharing
from pallas_kernels.ragged_decode.decode_problem import Decoded, Problem
from pallas_kernels.ragged_decode.shared import Shared

IMPLEMENTATIONS = dispatch.Implementations(
    "ragged_decode",
    "pallas_kernels.ragged_decode",
    "decode",
    {"cpu": ("native",), "tpu": ("tpu",), "gpu": ("mosaic_gpu", "triton")},
)


def ragged_decode(
    q: Float[Array, "B H G K"],
    pages: Pages,
    length: Int[Array, "B H"],
    *,
    runs: tuple[int, ...],
    starts: Int[Array, "B H"] | None = None,
    part: bool = False,
    scale: float,
    log_mass: Float[Array, "B H"] | None = None,
    k_scale: Float[Array, "B H K"] | None = None,
    v_scale: Float[Array, "B P R"] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    slopes: Float[np.ndarray, "H G"] | None = None,
    position: Int[Array, "B P R"] | None = None,
    query_position: Int[Array, " B"] | None = None,
    with_logits: bool = False,
    logits_scale: float | None = None,
    first_row: Int[Array, ""] | None = None,
    shared: Shared | None = None,
    implementation: str | None = None,
    **options: Any,
) -> Decoded:
    """Softmax attention of one query per row over the first ``length`` slots of each KV head.

    The score of slot j is ``cap(scale * q . k_j) + slope * (position_j - query_position) + [j == 0] log_mass``, where
    ``cap(x) = soft_cap * tanh(x / soft_cap)``. Slots past ``length`` have no effect, but their values must be finite.

    Args:
      q: queries grouped by KV head, of the K channels that the keys have; values have D, by default as many.
      pages: the pool; see ``pages.py``. int8 or float8 pages come with scales.
      length: int32, valid slots of each head, at most those of its pages; 0 is allowed.
      runs: pages of each head, static; head h owns pages ``sum(runs[:h]) ...`` of every row. With ``starts``, the most
        pages that each head owns in any row; they need not sum to the pages of a row.
      starts: int32, first page of each head's run in each row, where runs differ from row to row: head h owns pages
        ``starts[b, h]`` up to the next head's, and the last head up to the row's last page. A row's starts begin with 0
        and rise by at least 1; as they may be traced, nothing checks that.
      part: the heads are some of those that a row's pages belong to, neighbours: ``starts`` may then begin anywhere,
        and what is behind the last head's ``length`` are others'. Scores by page are not given.
      scale: multiplies q . k.
      log_mass: added to the score of slot 0: log N of a slot that stands for N tokens.
      k_scale: multiplies each channel of the stored keys. v_scale: multiplies each slot's stored value.
      window: attend only to the last ``window`` tokens: by ``position`` where given, else by slot.
      soft_cap: bound of the scores.
      slopes: ALiBi's slopes; they need ``position`` and ``query_position``.
      position: int32, position of the token in each slot. query_position: int32, position of each row's query.
      with_logits: also return the scores by page, scaled by ``logits_scale``, if given, instead of ``scale``.
      first_row: int32; the queries are of rows ``first_row ... first_row + B - 1`` of the pages, ``v_scale`` and
        ``position``, which have more rows than B; all other arguments and the results have these B rows only.
      shared: a pool that all rows attend to beside their own, merged by log-sum-exp; ``log_mass`` and logits are of the
        rows' own slots.
      implementation: the only one to try; by default the platform's in order, "xla" last.
      options: options of the implementation that is named: ``config`` (block sizes), ``interpret``.

    Raises:
      ValueError: an argument of another shape or type, or some that contradict each other.
      NotImplementedError: the implementation that was named cannot do this.
    """
    problem = Problem(
        q=q,
        pages=pages,
        length=length,
        runs=tuple(runs),
        starts=starts,
        part=part,
        scale=scale,
        log_mass=log_mass,
        k_scale=k_scale,
        v_scale=v_scale,
        window=window,
        soft_cap=soft_cap,
        slopes=slopes,
        position=position,
        query_position=query_position,
        with_logits=with_logits,
        logits_scale=logits_scale,
        first_row=first_row,
    )
    _check(problem)
    numbers = {name: argument_checks.plain(getattr(problem, name)) for name in ("scale", "logits_scale", "soft_cap")}
    problem = dataclasses.replace(problem, **numbers)
    if shared is None:
        return IMPLEMENTATIONS.run(implementation, problem, **options)
    sharing.check(problem, shared)
    return sharing.with_shared(lambda one: IMPLEMENTATIONS.run(implementation, one, **options), problem, shared)


def _check(p: Problem) -> None:
    if not isinstance(p.pages, Pages):
        kind = type(p.pages).__name__
        raise ValueError(f"pages are of type {kind}; give Columns, Stacked or Lanes, of pallas_kernels.pages.")
    batch, total, page_size, _ = p.pages.shape
    some = p.first_row is not None
    argument_checks.array("q", p.q, (None if some else batch, None, None, p.pages.key_dim), argument_checks.FLOAT)
    rows, heads, group = p.q.shape[:3]
    if some:
        argument_checks.array("first_row", p.first_row, (), argument_checks.INTEGER)
        if rows > batch:
            raise ValueError(f"q has {rows} rows, and the pages of which first_row names one have {batch}.")
    if not jnp.issubdtype(p.pages.dtype, jnp.floating) and p.pages.dtype != jnp.int8:
        raise ValueError(f"pages are {p.pages.dtype}; give floats or int8.")
    for run in p.runs:
        argument_checks.at_least("a head's run", run, 1)
    if p.part and (p.starts is None or p.with_logits):
        raise ValueError("part is of heads that starts says the pages of, and gives no scores by page.")
    covered = sum(p.runs) == total if p.starts is None else max(p.runs) <= total and (p.part or total <= sum(p.runs))
    if group < 1 or len(p.runs) != heads or not covered:
        raise ValueError(f"{len(p.runs)} runs of {sum(p.runs)} pages, q {p.q.shape}, {total} pages; they must agree.")
    by_slot = (batch, total, page_size)
    argument_checks.array("length", p.length, (rows, heads), argument_checks.INTEGER)
    argument_checks.arrays(
        argument_checks.INTEGER,
        starts=(p.starts, (rows, heads)),
        position=(p.position, by_slot),
        query_position=(p.query_position, (rows,)),
    )
    argument_checks.arrays(
        argument_checks.FLOAT,
        log_mass=(p.log_mass, (rows, heads)),
        k_scale=(p.k_scale, (rows, heads, p.pages.key_dim)),
        v_scale=(p.v_scale, by_slot),
        slopes=(p.slopes, (heads, group)),
    )
    placed = p.slopes is not None or (p.window is not None and p.position is not None)
    if placed and (p.position is None or p.query_position is None):
        raise ValueError("slopes, and a window by position, need the position of every slot and query_position.")
    argument_checks.number("scale", p.scale)
    if p.logits_scale is not None:
        argument_checks.number("logits_scale", p.logits_scale)
    argument_checks.bounds(p.window, p.soft_cap)
