"""A layer's part of a pool that all layers of a model share.

Where a policy chooses among all heads of a model (``Policy.shares_layers``), the cache has one pool whose heads are
those of every layer, one layer's after the other's. Its rows are divided among the heads as those of any pool are
(``runs.py``), so a layer's pages are neighbours, and where they begin and end is each row's own.

What reads or writes one layer is given a :class:`LayerView`: the layer's heads, with the pages, marks and scales of
values of the whole pool. Views are made within a program and put together again there, one after the other, so that
the pool is written in place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.cache.pool import LayerCache, pages_for


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerView(LayerCache):
    """One layer's heads, in the pages of all layers.

    Attributes:
      row_end: [B] one past the last page of the layer in each row.
      head_pages: pages of the slots that a head holds at most, static.
    """

    row_end: Int[Array, " B"] = dataclasses.field(kw_only=True)
    head_pages: int = dataclasses.field(kw_only=True, metadata={"static": True})

    @property
    def most_pages(self) -> int:
        return min(super().most_pages, self.head_pages)

    @property
    def row_ends(self) -> Int[Array, "B H"]:
        assert self.row_starts is not None
        return jnp.concatenate([self.row_starts[:, 1:], self.row_end[:, None]], axis=1)


def layer_views(pool: LayerCache, tokens: int) -> list[LayerView]:
    """The layers of a pool, whose rows have seen at most so many ``tokens``."""
    starts, heads = pool.row_starts, len(pool.pages) // pool.model_layers
    assert starts is not None
    ends = jnp.concatenate([starts[:, heads::heads], jnp.full((len(starts), 1), sum(pool.pages), starts.dtype)], axis=1)
    views = []
    for i in range(pool.model_layers):
        own = slice(i * heads, (i + 1) * heads)
        state = None if pool.state is None else pool.state[i]
        views.append(_view(pool, tokens, lambda x, own=own: x[:, own], ends[:, i], state))
    return views


def layer_view(pool: LayerCache, tokens: int, layer: Int[Array, ""]) -> LayerView:
    """One layer of such a pool, by a number that a program is given; ``pool.state`` is that of this layer alone."""
    starts, heads = pool.row_starts, len(pool.pages) // pool.model_layers
    assert starts is not None
    after = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=sum(pool.pages))
    end = jax.lax.dynamic_index_in_dim(after, (layer + 1) * heads, axis=1, keepdims=False)
    own = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=layer * heads, slice_size=heads, axis=1)
    return _view(pool, tokens, own, end, pool.state)


def _view(pool: LayerCache, tokens: int, own: Callable[[Array], Array], end: Int[Array, " B"], state: Any) -> LayerView:
    """The view of a layer, of whose heads ``own`` cuts the numbers out of those of all, [B, heads, ...]."""
    assert pool.row_starts is not None
    heads, parts = len(pool.pages) // pool.model_layers, pool.sharding.page_parts
    scales = pool.scales and dataclasses.replace(pool.scales, k=own(pool.scales.k), clipped=own(pool.scales.clipped))
    changed: dict[str, Any] = {
        "length": own(pool.length),
        "next": own(pool.next),
        "state": state,
        # How many each head has is in the runs; only their sum counts.
        "pages": counts_of_sum(sum(pool.pages), heads, parts),
        "scales": scales,
        "row_starts": own(pool.row_starts),
        "model_layers": 1,
    }
    given = {field.name: getattr(pool, field.name) for field in dataclasses.fields(pool)}
    head_pages = -(-pages_for(tokens, pool.page_size) // parts) * parts
    return LayerView(**{**given, **changed}, row_end=end, head_pages=head_pages)


def counts_of_sum(pages: int, heads: int, parts: int) -> tuple[int, ...]:
    """Pages of heads that say no more than their sum; multiples of the devices that shard them."""
    return (pages - (heads - 1) * parts, *(parts,) * (heads - 1))


def with_pages_of(view: LayerView, other: LayerView) -> LayerView:
    """The view in the pages as another layer's has left them."""
    scales = view.scales and other.scales and dataclasses.replace(view.scales, v=other.scales.v)
    return view.replace(kv=other.kv, marks=other.marks, scales=scales)  # pyright: ignore[reportReturnType]


def joined_views(pool: LayerCache, views: Sequence[LayerView]) -> LayerCache:
    """The pool with what its layers hold now, in the pages as the last has left them."""
    last = views[-1]

    def heads(name: str) -> Array:
        return jnp.concatenate([getattr(view, name) for view in views], axis=1)

    scales = last.scales
    if scales is not None:
        found = [view.scales for view in views if view.scales is not None]
        k, clipped = (jnp.concatenate([getattr(one, name) for one in found], axis=1) for name in ("k", "clipped"))
        scales = dataclasses.replace(scales, k=k, clipped=clipped)
    state = None if pool.state is None else tuple(view.state for view in views)
    return pool.replace(
        kv=last.kv, marks=last.marks, scales=scales, state=state, length=heads("length"), next=heads("next")
    )
