"""Runs of pages: which pages of a row belong to which of its heads.

The heads of a pool own its pages in order, a contiguous run each. In most pools the runs are static and the same for
all rows. Where a policy lets the heads of a layer share its slots (``Policy.shares_slots``), each row has its own: the
pages of a row are as many as before, and an array of the cache says where each head's run begins. Whatever a row's
heads have kept, :func:`fitted` gives every one of them room for equally many tokens more, since each decode step adds
one to all.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def fitted(length: Int[Array, "B H"], pages: int, page_size: int, parts: int = 1) -> Int[Array, "B H"]:
    """The first page of each head's run, so that each holds its ``length`` slots and all have equal room for more.

    Args:
      pages: of a row. parts: devices that shard them; each run is a multiple of it, and so is ``pages``.

    With S the slots of ``parts`` pages, the room is at least (pages page_size - sum of lengths) / H - S.
    """
    heads, slots = length.shape[1], parts * page_size
    # Runs are rounded up to whole pages, which takes less than one a head.
    spare = (pages // parts - heads) * slots - length.sum(axis=1, keepdims=True, dtype=jnp.int32)
    wanted = length.astype(jnp.int32) + jnp.maximum(spare // heads, 0)
    runs = jnp.maximum(-(-wanted // slots), 1) * parts
    return (jnp.cumsum(runs, axis=1, dtype=jnp.int32) - runs).astype(jnp.int32)


def ends(starts: Int[Array, "B H"], pages: int) -> Int[Array, "B H"]:
    """One past the last page of each head's run."""
    return jnp.concatenate([starts[:, 1:], jnp.full((starts.shape[0], 1), pages, starts.dtype)], axis=1)


def owners(starts: Int[Array, "B H"], pages: int) -> tuple[Int[Array, "B P"], Int[Array, "B P"]]:
    """The head of each page, and the page's index within that head's run; below 0 before the first run."""
    page = jnp.arange(pages, dtype=jnp.int32)
    owner = (page[:, None] >= starts[:, None, 1:]).sum(axis=2, dtype=jnp.int32)
    return owner, page - jnp.take_along_axis(starts, owner, axis=1)


def reduced(x: Array, owner: Int[Array, "B P"], heads: int, over: Callable[..., Array], empty: float) -> Array:
    """Numbers of pages, [B, P, ...], reduced over those of each head, [B, H, ...]; ``empty`` is what adds nothing."""
    own = owner[:, None] == jnp.arange(heads, dtype=owner.dtype)[:, None]
    return over(jnp.where(own.reshape(*own.shape, *(1,) * (x.ndim - 2)), x[:, None], empty), axis=2)


def of_owner(x: Array, owner: Int[Array, "B P"]) -> Array:
    """Numbers of heads, [B, H, ...], as the pages of these heads have them, [B, P, ...]."""
    return jnp.take_along_axis(x, owner.reshape(*owner.shape, *(1,) * (x.ndim - 2)), axis=1)


def of_heads(
    starts: Int[Array, "B H"], after: Int[Array, "B H"], most: int
) -> tuple[Int[Array, "B H M"], Bool[Array, "B H M"]]:
    """The first ``most`` pages of each head's run, and which of them there are; 0 for the others.

    ``after`` are :func:`ends`: one past the last page of each.
    """
    index = starts[..., None] + jnp.arange(most, dtype=jnp.int32)
    inside = index < after[..., None]
    return jnp.where(inside, index, 0), inside


def paged(x: Array, starts: Int[Array, "B H"], pages: int, page_size: int) -> Array:
    """Slots of heads, [B, H, N, ...], as the pages of rows, [B, P, R, ...]: zeros beyond N, cut to runs."""
    batch, heads, count = x.shape[:3]
    owner, nth = owners(starts, pages)
    slot = nth[..., None] * page_size + jnp.arange(page_size, dtype=jnp.int32)
    flat = x.reshape(batch, heads * count, *x.shape[3:])
    place = owner[..., None] * count + jnp.clip(slot, 0, count - 1)
    trailing = (1,) * (x.ndim - 3)
    index = place.reshape(batch, -1, *trailing)
    taken = jnp.take_along_axis(flat, index, axis=1).reshape(batch, pages, page_size, *x.shape[3:])
    return jnp.where((slot < count).reshape(*slot.shape, *trailing), taken, jnp.zeros((), x.dtype))


def moved(x: Array, old: Int[Array, "B H"], new: Int[Array, "B H"], pages: int) -> Array:
    """Numbers by page, [B, P, ...], where the runs begin elsewhere and a row has ``pages``: zeros in what is new."""
    index, inside = of_heads(old, ends(old, x.shape[1]), x.shape[1])
    owner, nth = owners(new, pages)
    there = nth < x.shape[1]
    place = owner * x.shape[1] + jnp.where(there, nth, 0)
    source, held = (jnp.take_along_axis(each.reshape(len(x), -1), place, axis=1) for each in (index, inside))
    trailing = (1,) * (x.ndim - 2)
    taken = jnp.take_along_axis(x, source.reshape(*source.shape, *trailing), axis=1)
    return jnp.where((held & there).reshape(*source.shape, *trailing), taken, jnp.zeros((), x.dtype))
