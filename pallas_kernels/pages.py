"""Memory layouts of paged keys and values: three layouts of the same pages.

A *page* holds R consecutive slots (tokens) of one KV head of one row of the batch. Head h of every row owns ``runs[h]``
consecutive pages, so a head's slots are contiguous whatever its length, and two heads may own very different numbers.

``Columns`` is for CPUs: keys transposed within the page, so that a decode step's products run along contiguous memory.
``Stacked`` is for accelerators: a page is its keys, then its values, so a run of pages is one contiguous copy.
``Lanes`` is for head sizes of half a TPU's lanes (D = 64): a slot's key and value side by side in one row of 128 lanes.
As two arrays of 64 lanes they would be padded to twice their bytes, and copied whole to another layout to be read
(compiled for v5e: 270 MB of temporary memory for a 134 MB cache).

Keys may have fewer channels than values (K instead of D), of which ``Columns`` and ``Lanes`` then hold no more.

Slots that were never written are zeros, never NaN: kernels multiply masked values by a weight of 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

#: Index of slots, as in ``x.at[index]`` of a [B, P, R, D] array: (batch row, page, slot in the page), broadcastable.
Index = tuple[Array, Array, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Columns:
    """``k[B, P, K, R]`` and ``v[B, P, R, D]``."""

    k: Float[Array, "B P K R"] | Int[Array, "B P K R"]
    v: Float[Array, "B P R D"] | Int[Array, "B P R D"]

    @classmethod
    def zeros(
        cls, batch: int, pages: int, page_size: int, head_dim: int, dtype: DTypeLike, key_dim: int | None = None
    ) -> Self:
        """Empty pages; ``key_dim`` is K, by default D."""
        k = jnp.zeros((batch, pages, key_dim or head_dim, page_size), dtype)
        return cls(k, jnp.zeros((batch, pages, page_size, head_dim), dtype))

    def of_rows(self, k: Array, v: Array) -> Self:
        """Pages that hold keys [B, P, R, K] and values [B, P, R, D], in this layout and dtype."""
        return dataclasses.replace(self, k=k.swapaxes(-1, -2).astype(self.dtype), v=v.astype(self.v.dtype))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, P, R, D."""
        batch, pages, page_size, head_dim = self.v.shape
        return batch, pages, page_size, head_dim

    @property
    def key_dim(self) -> int:
        """K."""
        return self.k.shape[2]

    @property
    def dtype(self) -> Any:
        return self.k.dtype

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot of one head, padding included."""
        return self.k.shape[2] * self.k.dtype.itemsize + self.v.shape[3] * self.v.dtype.itemsize

    def keys(self) -> Array:
        """[B, P, R, K] keys as rows; a view that XLA fuses where it can."""
        return self.k.swapaxes(-1, -2)

    def values(self) -> Array:
        """[B, P, R, D] values as rows."""
        return self.v

    def at_pages(self, where: Any) -> tuple[Array, Array]:
        """Keys [..., R, K] and values [..., R, D] of some pages, ``where`` an index of [B, P].

        They are gathered first and transposed afterwards, so that no copy of the whole pool is made.
        """
        return self.k[where].swapaxes(-1, -2), self.v[where]

    def key_at(self, index: Index) -> Array:
        """[..., K] keys of some slots."""
        batch, page, slot = index
        return self.k[batch, page, :, slot]

    def value_at(self, index: Index) -> Array:
        """[..., D] values of some slots."""
        return self.v[index]

    def set_keys(self, index: Index, k: Array) -> Self:
        """Write keys [..., K] in place; indices out of range are dropped."""
        batch, page, slot = index
        return dataclasses.replace(self, k=self.k.at[batch, page, :, slot].set(k.astype(self.dtype), mode="drop"))

    def set_values(self, index: Index, v: Array) -> Self:
        """Write values [..., D] in place; indices out of range are dropped."""
        return dataclasses.replace(self, v=self.v.at[index].set(v.astype(self.v.dtype), mode="drop"))

    def set_pages(self, row: Array, page: Array, k: Array, v: Array) -> Self:
        """Write whole pages of one row of the batch, keys [..., R, K] and values [..., R, D], in place."""
        new_k = self.k.at[row, page].set(k.swapaxes(-1, -2).astype(self.dtype))
        return dataclasses.replace(self, k=new_k, v=self.v.at[row, page].set(v.astype(self.v.dtype)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stacked:
    """``kv[B, P, 2, R, E]``: keys, then values; E is the head size, or 128 where TPU lanes pad it (D = 80, 96)."""

    kv: Float[Array, "B P 2 R E"] | Int[Array, "B P 2 R E"]
    head_dim: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def zeros(
        cls, batch: int, pages: int, page_size: int, head_dim: int, dtype: DTypeLike, lanes: int | None = None
    ) -> Self:
        """Empty pages; ``lanes`` is E."""
        return cls(jnp.zeros((batch, pages, 2, page_size, lanes or head_dim), dtype), head_dim)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, P, R, D."""
        batch, pages, _, page_size, _ = self.kv.shape
        return batch, pages, page_size, self.head_dim

    @property
    def key_dim(self) -> int:
        """D: keys and values are rows of one size."""
        return self.head_dim

    @property
    def dtype(self) -> Any:
        return self.kv.dtype

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot of one head, padding included."""
        return 2 * self.kv.shape[4] * self.kv.dtype.itemsize

    def of_rows(self, k: Array, v: Array) -> Self:
        """Pages that hold keys and values [B, P, R, D], in this layout and dtype."""

        def arranged(k: Array, v: Array) -> Array:
            return jnp.stack([self._padded(k), self._padded(v)], axis=2)

        lanes = self.kv.shape[4]
        return dataclasses.replace(self, kv=arranged(k, v) if lanes == self.head_dim else _in_parts(arranged, k, v))

    def _padded(self, x: Array) -> Array:
        fill = self.kv.shape[4] - x.shape[-1]
        return jnp.pad(x.astype(self.dtype), ((0, 0),) * (x.ndim - 1) + ((0, fill),))

    def keys(self) -> Array:
        """[B, P, R, D] keys as rows."""
        return self.kv[:, :, 0, :, : self.head_dim]

    def values(self) -> Array:
        """[B, P, R, D] values as rows."""
        return self.kv[:, :, 1, :, : self.head_dim]

    def at_pages(self, where: Any) -> tuple[Array, Array]:
        """Keys and values [..., R, D] of some pages, ``where`` an index of [B, P]."""
        pages = self.kv[where][..., : self.head_dim]
        return pages[..., 0, :, :], pages[..., 1, :, :]

    def key_at(self, index: Index) -> Array:
        """[..., D] keys of some slots."""
        batch, page, slot = index
        return self.kv[batch, page, 0, slot][..., : self.head_dim]

    def value_at(self, index: Index) -> Array:
        """[..., D] values of some slots."""
        batch, page, slot = index
        return self.kv[batch, page, 1, slot][..., : self.head_dim]

    def set_keys(self, index: Index, k: Array) -> Self:
        """Write keys [..., D] in place; indices out of range are dropped."""
        batch, page, slot = index
        return dataclasses.replace(self, kv=self.kv.at[batch, page, 0, slot].set(self._padded(k), mode="drop"))

    def set_values(self, index: Index, v: Array) -> Self:
        """Write values [..., D] in place; indices out of range are dropped."""
        batch, page, slot = index
        return dataclasses.replace(self, kv=self.kv.at[batch, page, 1, slot].set(self._padded(v), mode="drop"))

    def set_pages(self, row: Array, page: Array, k: Array, v: Array) -> Self:
        """Write whole pages of one row of the batch, rows [..., R, D], in place."""
        kv = jnp.stack([self._padded(k), self._padded(v)], axis=-3)
        return dataclasses.replace(self, kv=self.kv.at[row, page].set(kv))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lanes:
    """``kv[B, P, R, E]``: a slot's key in the lower lanes, its value in those that follow.

    ``channels`` are K and D where they differ, or where E is more than both; by default each is half of E.
    """

    kv: Float[Array, "B P R E"] | Int[Array, "B P R E"]
    channels: tuple[int, int] | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def zeros(
        cls,
        batch: int,
        pages: int,
        page_size: int,
        head_dim: int,
        dtype: DTypeLike,
        key_dim: int | None = None,
        lanes: int = 0,
    ) -> Self:
        """Empty pages; ``key_dim`` is K, by default D, and ``lanes`` what E is at least."""
        channels = (key_dim or head_dim, head_dim)
        width = max(sum(channels), lanes)
        even = width == 2 * head_dim == 2 * channels[0]
        return cls(jnp.zeros((batch, pages, page_size, width), dtype), None if even else channels)

    def of_rows(self, k: Array, v: Array) -> Self:
        """Pages that hold keys [B, P, R, K] and values [B, P, R, D], in this layout and dtype."""
        return dataclasses.replace(self, kv=_in_parts(self._side_by_side, k, v))

    def _side_by_side(self, k: Array, v: Array) -> Array:
        fill = self.kv.shape[3] - k.shape[-1] - v.shape[-1]
        parts = [k, v, jnp.zeros((*v.shape[:-1], fill), v.dtype)] if fill else [k, v]
        return jnp.concatenate(parts, axis=-1).astype(self.dtype)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, P, R, D."""
        batch, pages, page_size, lanes = self.kv.shape
        return batch, pages, page_size, lanes // 2 if self.channels is None else self.channels[1]

    @property
    def key_dim(self) -> int:
        """K."""
        return self.kv.shape[3] // 2 if self.channels is None else self.channels[0]

    @property
    def _values(self) -> slice:
        """The lanes of values."""
        return slice(self.key_dim, self.key_dim + self.shape[3])

    @property
    def dtype(self) -> Any:
        return self.kv.dtype

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot of one head, padding included."""
        return self.kv.shape[3] * self.kv.dtype.itemsize

    def keys(self) -> Array:
        """[B, P, R, K] keys as rows."""
        return self.kv[..., : self.key_dim]

    def values(self) -> Array:
        """[B, P, R, D] values as rows."""
        return self.kv[..., self._values]

    def at_pages(self, where: Any) -> tuple[Array, Array]:
        """Keys [..., R, K] and values [..., R, D] of some pages, ``where`` an index of [B, P]."""
        pages = self.kv[where]
        return pages[..., : self.key_dim], pages[..., self._values]

    def key_at(self, index: Index) -> Array:
        """[..., K] keys of some slots."""
        return self.kv[index][..., : self.key_dim]

    def value_at(self, index: Index) -> Array:
        """[..., D] values of some slots."""
        return self.kv[index][..., self._values]

    def set_keys(self, index: Index, k: Array) -> Self:
        """Write keys [..., K] in place; indices out of range are dropped."""
        lanes = self.kv.at[(*(x[..., None] for x in index), jnp.arange(self.key_dim))]
        return dataclasses.replace(self, kv=lanes.set(k.astype(self.dtype), mode="drop"))

    def set_values(self, index: Index, v: Array) -> Self:
        """Write values [..., D] in place; indices out of range are dropped."""
        lanes = self.kv.at[(*(x[..., None] for x in index), self.key_dim + jnp.arange(self.shape[3]))]
        return dataclasses.replace(self, kv=lanes.set(v.astype(self.dtype), mode="drop"))

    def set_pages(self, row: Array, page: Array, k: Array, v: Array) -> Self:
        """Write whole pages of one row of the batch, keys [..., R, K] and values [..., R, D], in place."""
        return dataclasses.replace(self, kv=self.kv.at[row, page].set(self._side_by_side(k, v)))


Pages = Columns | Stacked | Lanes

#: Slots that :func:`_in_parts` converts at once.
_PART = 8192


def _in_parts(arranged: Callable[[Array, Array], Array], k: Array, v: Array) -> Array:
    """Apply ``arranged`` to keys and values [B, P, R, D], some pages of one batch row at a time.

    A TPU stores arrays of fewer than 128 channels with their tokens along the lanes, and transposes them to pad the
    channels. All pages at once, that takes temporary memory of twice their bytes (D = 64); page by page, none.
    """
    batch, total, page_size, _ = k.shape
    count = min(max(_PART // page_size, 1), total)
    steps = -(-total // count)
    if batch * steps == 1:
        return arranged(k, v)
    made = jax.eval_shape(arranged, k, v)

    def write(i: Array, out: Array) -> Array:
        # The last part of a row starts earlier where it would reach past the row's end.
        row, page = i // steps, jnp.minimum(i % steps * count, total - count)
        part = [jax.lax.dynamic_slice(x, (row, page, 0, 0), (1, count, *x.shape[2:])) for x in (k, v)]
        return jax.lax.dynamic_update_slice(out, arranged(*part), (row, page, *(0,) * (out.ndim - 2)))

    return jax.lax.fori_loop(0, batch * steps, write, jnp.zeros(made.shape, made.dtype))
