"""Inputs for measuring decode steps: a cache whose heads kept very different numbers of tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.pages import Columns, Lanes, Pages, Stacked
from pallas_kernels.ragged_decode.decode_problem import Problem


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a decode step.

    Attributes:
      batch: rows. heads: KV heads. group: queries a KV head.
      mean: mean slots per head. sigma: standard deviation of the logarithm of heads' lengths; 0 for equal lengths.
      dtype: dtype of keys and values; queries are bfloat16 where it has 8 bits.
      page_size: slots of a page; ``None`` for the platform's.
      live: fraction of each head's pages that is filled; below 1 for a cache that still grows.
    """

    batch: int = 16
    heads: int = 8
    group: int = 4
    head_dim: int = 128
    mean: int = 2048
    sigma: float = 0.8
    dtype: str = "bfloat16"
    page_size: int | None = None
    live: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for invalid sizes, before anything is allocated."""
        for name in ("batch", "heads", "group", "head_dim", "mean", "page_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give at least 1.")
        if not 0 <= self.sigma < 10:
            raise ValueError(f"sigma is {self.sigma}; give 0 for equal lengths, or less than 10.")
        if not 0 < self.live <= 1:
            raise ValueError(f"live is {self.live}; give a fraction above 0, at most 1.")
        stored_dtype(self.dtype)

    @property
    def page(self) -> int:
        """Slots of a page; by default those that this platform's kernels read best."""
        by_platform = {"gpu": 64, "tpu": 16 if jnp.dtype(self.dtype).itemsize > 1 else 128}
        return self.page_size or by_platform.get(dispatch.platform(), 16)

    def capacities(self) -> np.ndarray:
        """Slots of each head [H]: log-normal with this mean, the same for all rows, as in a cache's plan."""
        rng = np.random.default_rng(self.seed)
        drawn = np.exp(self.sigma * rng.standard_normal(self.heads))
        return np.maximum(np.round(drawn * self.mean / drawn.mean()), 1).astype(np.int64)

    @property
    def runs(self) -> tuple[int, ...]:
        """Pages of each head [H]."""
        return tuple(int(-(-slots // self.page)) for slots in self.capacities())

    def lengths(self) -> np.ndarray:
        """Valid slots [B, H]: up to a tenth below a head's capacity, as rows differ."""
        rng = np.random.default_rng(self.seed + 1)
        filled = self.live * rng.uniform(0.9, 1.0, (self.batch, self.heads))
        return np.maximum(filled * self.capacities(), 1).astype(np.int32)

    @property
    def live_bytes(self) -> int:
        """Bytes of the keys and values that a step has to read."""
        return int(self.lengths().sum()) * 2 * self.head_dim * jnp.dtype(self.dtype).itemsize


def stored_dtype(name: str) -> jnp.dtype:
    """The dtype of this name, if keys and values can be stored in it.

    Raises:
      ValueError: they cannot.
    """
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        dtype = None
    if dtype is None or not (jnp.issubdtype(dtype, jnp.floating) or dtype == jnp.int8) or dtype.itemsize > 4:
        raise ValueError(f"dtype is {name!r}; give one such as bfloat16, int8 or float8_e4m3fn.")
    return dtype


def make(sizes: Sizes) -> Problem:
    """The problem with random rows, in the layout of this platform's caches."""
    dtype = jnp.dtype(sizes.dtype)
    query = dtype if dtype.itemsize > 1 else jnp.dtype(jnp.bfloat16)
    total = sum(sizes.runs)
    shape = (sizes.batch, total, sizes.page, sizes.head_dim)
    keys = jax.random.split(jax.random.key(sizes.seed), 5)
    q = jax.random.normal(keys[0], (sizes.batch, sizes.heads, sizes.group, sizes.head_dim), jnp.float32)
    k_scale = v_scale = None
    if dtype.itemsize == 1:
        k_scale = jax.random.uniform(keys[3], (sizes.batch, sizes.heads, sizes.head_dim), minval=0.5) / 40
        v_scale = jax.random.uniform(keys[4], shape[:3], minval=0.5) / 40
    return Problem(
        q=q.astype(query),
        pages=_pages(keys[1], keys[2], shape, dtype),
        length=jnp.asarray(sizes.lengths()),
        runs=sizes.runs,
        scale=sizes.head_dim**-0.5,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def _pages(key: jax.Array, other: jax.Array, shape: tuple[int, int, int, int], dtype: jnp.dtype) -> Pages:
    platform, (batch, total, page, dim) = dispatch.platform(), shape
    if platform not in ("gpu", "tpu"):
        return Columns(_rows(key, (batch, total, dim, page), dtype), _rows(other, shape, dtype))
    if platform == "tpu" and dim == 64:
        return Lanes(_rows(key, (batch, total, page, 128), dtype))
    kv = _rows(key, (batch, total, 2, page, dim), dtype)
    if platform == "tpu" and dim % 128:
        kv = jnp.pad(kv, ((0, 0),) * 4 + ((0, -dim % 128),))
    return Stacked(kv, dim)


def _rows(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Random numbers, one batch row at a time: a float32 copy of the whole pool would not fit beside it."""

    def row(key: jax.Array) -> jax.Array:
        drawn = jax.random.normal(key, shape[1:], jnp.float32)
        return (jnp.clip(jnp.round(40 * drawn), -120, 120) if dtype.itemsize == 1 else drawn).astype(dtype)

    return jax.jit(lambda keys: jax.lax.map(row, keys))(jax.random.split(key, shape[0]))
