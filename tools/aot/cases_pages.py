"""Writing into pages in place: one token a head at every step, and whole prompts; XLA's scatters, not kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.array_bytes import nbytes
from pallas_kernels.pages import Lanes, Pages, Stacked
from tools.aot.cases import Case

BATCH, HEADS, PAGES = 8, 8, 2048


def _append(pages: Pages, index: tuple[jax.Array, jax.Array, jax.Array], k: jax.Array, v: jax.Array) -> Pages:
    return pages.set_keys(index, k).set_values(index, v)


def _pack(pages: Pages, k: jax.Array, v: jax.Array) -> Pages:
    return pages.of_rows(k, v)


def _pages(platform: str, head_dim: int, dtype: Any) -> Pages:
    page_size = 128 if platform == "tpu" else 64
    if platform == "tpu" and head_dim == 64:
        return jax.eval_shape(lambda: Lanes.zeros(BATCH, PAGES, page_size, head_dim, dtype))
    lanes = -(-head_dim // 128) * 128 if platform == "tpu" else head_dim
    return jax.eval_shape(lambda: Stacked.zeros(BATCH, PAGES, page_size, head_dim, dtype, lanes))


def _cases(platform: str, head_dim: int, dtype: Any) -> list[Case]:
    pages, shape = _pages(platform, head_dim, dtype), jax.ShapeDtypeStruct
    name = f"D = {head_dim}, {jnp.dtype(dtype).name}"
    size = nbytes(pages)
    places = tuple(shape((BATCH, HEADS), jnp.int32) for _ in range(3))
    token = shape((BATCH, HEADS, head_dim), dtype)
    rows = shape(pages.shape, dtype)
    keywords: dict[str, Any] = dict(cache_bytes=size, platforms=(platform,), kernels=())
    return [
        Case(name, "append", _append, (pages, places, token, token), donated=(0,), **keywords),
        # The rows of a prompt are moved once, to where they stay.
        Case(name, "pack", _pack, (pages, rows, rows), **keywords),
    ]


def cases() -> list[Case]:
    """On the pages that each platform reads."""
    found = []
    for platform in ("tpu", "gpu"):
        for head_dim, dtype in ((128, jnp.bfloat16), (64, jnp.bfloat16), (80, jnp.bfloat16), (128, jnp.int8)):
            found += _cases(platform, head_dim, dtype)
    return found
