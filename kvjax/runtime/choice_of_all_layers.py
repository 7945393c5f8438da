"""The choice of a policy whose layers share their slots, once all of them have read a prompt.

Each layer's candidates are weighed first, and nothing but their scores stays. Then one choice is made among all, which
says where each head's run begins; and the layers are laid out in the pool one after the other, each from the slots it
had and its dense keys and values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import runs
from kvjax.cache.layer_view import LayerView, counts_of_sum
from kvjax.cache.packing import lay_out
from kvjax.cache.pool import LayerCache, pages_for
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy, PromptChunk, Weighed
from kvjax.policies.candidates import gather_candidates, places_of
from kvjax.policies.signals import PromptSignals
from kvjax.runtime.prefill_and_compress import Counts
from kvjax.runtime.prefill_layer import zero_after

#: Keys and values [B, H, T, D] of a layer's new tokens.
Dense = tuple[Float[Array, "B H T D"], Float[Array, "B H T D"]]


def compress_together(
    policy: Policy,
    configs: Sequence[ModelConfig],
    numbers: Sequence[int],
    pool: LayerCache,
    views: Sequence[LayerView],
    dense: Sequence[Dense],
    signals: Sequence[PromptSignals | None],
    tokens: Counts,
    pages: tuple[int, ...],
    *,
    fresh: bool,
) -> LayerCache:
    """The pool of all layers with what the policy keeps of their slots and their new tokens, in ``pages``.

    Args:
      configs, numbers: of the layers, as the policy counts them (``alike_layers.py``).
      views: their slots in order. dense, signals: what each has read.
    """
    how: dict[str, Any] = {"pages": pages, "fresh": fresh}
    weighed = [
        _weigh(policy, number, config, view, own, tokens, found, **how)
        for number, config, view, own, found in zip(numbers, configs, views, dense, signals, strict=True)
    ]
    keep, length, starts = chosen_of_all(policy, pool, weighed, tokens[1], pages)
    made = _zeros(pool.replace(pages=pages))
    scales: list[Any] = []
    zero = jnp.int32(0)
    for i, (one, view, own) in enumerate(zip(weighed, views, dense, strict=True)):
        heads = slice(i * len(view.pages), (i + 1) * len(view.pages))
        given = keep[i], one.marks, starts[:, heads], zero
        made, k_scale = _laid(configs[i], made, view, own, *given, tokens, layers=len(views), **how)
        scales.append(k_scale)
        zero = zero_after(*jax.tree.leaves(made.kv))
    if pool.scales is not None and made.scales is not None:
        k = jnp.concatenate(scales, axis=1)
        made = made.replace(scales=dataclasses.replace(made.scales, k=k, clipped=pool.scales.clipped))
    state = None if pool.state is None else tuple(one.state for one in weighed)
    return made.replace(length=length, next=length, row_starts=starts, state=state)


def chosen_of_all(
    policy: Policy, pool: LayerCache, weighed: Sequence[Weighed], count: Int[Array, " B"], pages: tuple[int, ...]
) -> tuple[list[Bool[Array, "B H N"]], Int[Array, "B A"], Int[Array, "B A"]]:
    """The candidates of each layer that stay, how many of each head, and the page that its run begins with."""
    keep = policy.choose(weighed, count)
    length = jnp.concatenate([each.sum(axis=2, dtype=jnp.int32) for each in keep], axis=1)
    return keep, length, runs.fitted(length, sum(pages), pool.page_size, pool.sharding.page_parts)


def _chunk(
    config: ModelConfig, tokens: Counts, signals: PromptSignals | None, pages: tuple[int, ...], fresh: bool
) -> PromptChunk:
    seen, count, _, total = tokens
    return PromptChunk(seen, count, total, pages=pages, config=config, fresh=fresh, signals=signals)


def weigh_one(
    policy: Policy,
    index: int,
    config: ModelConfig,
    view: LayerView,
    dense: Dense,
    tokens: Counts,
    signals: PromptSignals | None,
    *,
    pages: tuple[int, ...],
    fresh: bool,
) -> Weighed:
    """The policy's scores of a layer's slots and new tokens."""
    chunk = _chunk(config, tokens, signals, pages, fresh)
    return policy.weigh(index, view, gather_candidates(view, *dense, chunk), chunk)


def lay_out_one(
    config: ModelConfig,
    pool: LayerCache,
    view: LayerView,
    dense: Dense,
    keep: Bool[Array, "B H N"],
    marks: dict[str, Array],
    starts: Int[Array, "B H"],
    zero: Int[Array, ""],
    tokens: Counts,
    *,
    layers: int,
    pages: tuple[int, ...],
    fresh: bool,
) -> tuple[LayerCache, Array | None]:
    """The pool with the layer's kept candidates in runs from ``starts`` on, and its keys' scales.

    Pages behind the layer's are overwritten; they are those of the next, which is laid out later. ``zero`` is known
    when the layer before is in: only one layer's candidates are there at a time.
    """
    view = view.replace(length=view.length + zero)  # pyright: ignore[reportAssignmentType]
    candidates = gather_candidates(view, *dense, _chunk(config, tokens, None, pages, fresh))
    heads, parts, size = keep.shape[1], pool.sharding.page_parts, pool.page_size
    source, length = places_of(keep, keep.shape[2])
    source = source + zero
    k, v = (jnp.take_along_axis(x, source[..., None], axis=2) for x in (candidates.k, candidates.v))
    given = {name: jnp.take_along_axis(mark, source, axis=2) for name, mark in marks.items()}
    # At most: all candidates, a page a head more, and an equal part of the row as room for tokens that are decoded.
    total = sum(pool.pages)
    most = heads * (pages_for(keep.shape[2], size) + parts) + -(-total // layers)
    most = min(total, -(-most // parts) * parts)
    first = starts[:, 0]
    begin = jnp.minimum(first, total - most)
    scales = view.scales
    local = LayerCache(
        kv=pool.kv,
        length=view.length,
        next=view.next,
        log_mass=None,
        state=None,
        pages=counts_of_sum(most, heads, parts),
        marks=pool.marks,
        scales=scales,
        sharding=pool.sharding,
        row_starts=starts - begin[:, None],
    )
    local = lay_out(local, k, v, length, given)
    kv = _placed(pool.kv, local.kv, begin // parts, first // parts)
    own = _placed(pool.marks, local.marks, begin, first)
    if pool.scales is None or local.scales is None:
        return pool.replace(kv=kv, marks=own), None
    v_scale = _placed(pool.scales.v, local.scales.v, begin // parts, first // parts)
    return pool.replace(kv=kv, marks=own, scales=dataclasses.replace(pool.scales, v=v_scale)), local.scales.k


def _placed(whole: Any, part: Any, begin: Int[Array, " B"], first: Int[Array, " B"]) -> Any:
    """Numbers by page, [B, P, ...], with those of ``part`` from page ``begin`` on, but for the pages before ``first``.

    In place, row by row: a scatter would copy all rows on some backends.
    """

    def row(i: Array, whole: Any) -> Any:
        def put(old: Array, new: Array) -> Array:
            rest = (0,) * (old.ndim - 2)
            where, new = (i, begin[i], *rest), jax.lax.dynamic_slice_in_dim(new, i, 1, axis=0)
            there = jax.lax.dynamic_slice(old, where, new.shape)
            here = (begin[i] + jnp.arange(new.shape[1]) >= first[i]).reshape(1, -1, *(1,) * (new.ndim - 2))
            return jax.lax.dynamic_update_slice(old, jnp.where(here, new, there), where)

        return jax.tree.map(put, whole, part)

    return jax.lax.fori_loop(0, len(begin), row, whole)


def _zeros(pool: LayerCache) -> LayerCache:
    """An empty pool of these pages."""
    pages, parts = sum(pool.pages), pool.sharding.page_parts

    def empty(x: Array, count: int) -> Array:
        return jnp.zeros((len(x), count, *x.shape[2:]), x.dtype)

    scales = pool.scales and dataclasses.replace(pool.scales, v=empty(pool.scales.v, pages // parts))
    kv = jax.tree.map(lambda x: empty(x, pages // parts), pool.kv)
    return pool.replace(kv=kv, marks={name: empty(mark, pages) for name, mark in pool.marks.items()}, scales=scales)


#: Traced and lowered once for all layers that are alike; XLA inlines them.
_weigh = jax.jit(weigh_one, static_argnames=("policy", "index", "config", "pages", "fresh"))
_laid = jax.jit(lay_out_one, static_argnames=("config", "layers", "pages", "fresh"))
