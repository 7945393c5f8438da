"""Sliding windows: a query attends to the last tokens up to its own, and to none before them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def in_window(query: Int[Array, "*#S"], key: Int[Array, "*#S"], window: int | None) -> Bool[Array, "*S"]:
    """Whether a query at one index attends to a key at another: to none after it, and none before its window."""
    return query >= key if window is None else (query >= key) & (query - key < window)


def reach_of(window: int | None, place: Int[Array, "#B N"]) -> Int[Array, "#B N"] | None:
    """The number of rows before a chunk that each query at these places of it attends to; None for all."""
    return None if window is None else jnp.int32(window - 1) - place


def key_blocks(
    offset: Int[Array, "*B"], count: int, block: int, window: int | None
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """The first block of keys that some of ``count`` queries from an offset attends to, and the first beyond them."""
    blocks = (jnp.max(offset) + count + block - 1) // block
    first = jnp.int32(0) if window is None else jnp.maximum(jnp.min(offset) - window + 1, 0) // block
    return first, blocks
