"""The input :class:`Problem` and the result :class:`Decoded` of every implementation of ``ragged_decode``."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.pages import Pages


class Decoded(NamedTuple):
    """Result of a decode step.

    Attributes:
      out: [B, H, G, D] in the queries' dtype; zeros for an empty head.
      lse: [B, H, G] float32 log-sum-exp of the scores, by which partial results are merged; ``NEG`` for an empty head.
      logits: [B, P, G, R] float32 scores by page, ``NEG`` in masked slots; ``None`` unless requested.
    """

    out: Float[Array, "B H G D"]
    lse: Float[Array, "B H G"]
    logits: Float[Array, "B P G R"] | None


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of :func:`~pallas_kernels.ragged_decode.api.ragged_decode`, checked; see there.

    Attributes:
      first_visible: with ``starts``, the first page of each row that counts: those before it are another problem's.
    """

    q: Float[Array, "B H G K"]
    pages: Pages
    length: Int[Array, "B H"]
    runs: tuple[int, ...]
    scale: float
    log_mass: Float[Array, "B H"] | None = None
    k_scale: Float[Array, "B H K"] | None = None
    v_scale: Float[Array, "B P R"] | None = None
    window: int | None = None
    soft_cap: float | None = None
    slopes: Float[np.ndarray, "H G"] | None = None
    position: Int[Array, "B P R"] | None = None
    query_position: Int[Array, " B"] | None = None
    with_logits: bool = False
    logits_scale: float | None = None
    first_row: Int[Array, ""] | None = None
    starts: Int[Array, "B H"] | None = None
    part: bool = False
    first_visible: Int[Array, " B"] | None = None

    @property
    def by_row(self) -> bool:
        """Whether heads' runs differ from row to row; their first pages are then data, and ``runs`` bounds."""
        return self.starts is not None

    @property
    def uniform(self) -> bool:
        """Whether all heads own equally many pages, in every row."""
        return not self.by_row and len(set(self.runs)) == 1

    def own_rows(self) -> Problem:
        """The same problem on a copy of the pages of its own rows."""
        first, rows = self.first_row, self.q.shape[0]
        if first is None:
            return self

        def own(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, first, rows)

        pages, v_scale, position = jax.tree.map(own, (self.pages, self.v_scale, self.position))
        return dataclasses.replace(self, pages=pages, v_scale=v_scale, position=position, first_row=None)

    @property
    def first_page(self) -> Int[np.ndarray, " H"] | Int[Array, "B H"]:
        """First page of each head's run; [B, H] where runs are by row."""
        if self.starts is not None:
            return self.starts.astype(jnp.int32)
        return np.cumsum((0, *self.runs))[:-1].astype(np.int32)

    @property
    def owner(self) -> Int[np.ndarray, " P"] | Int[Array, "B P"]:
        """The head each page belongs to; [B, P] where runs are by row."""
        if self.starts is None:
            return np.repeat(np.arange(len(self.runs), dtype=np.int32), self.runs)
        page = jnp.arange(self.pages.shape[1], dtype=jnp.int32)
        # Of all heads but the first, so that any starts give an owner within bounds.
        return jnp.sum(page[:, None] >= self.starts[:, None, 1:], axis=2, dtype=jnp.int32)

    def by_page(self, x: Shaped[Array, "B H *N"]) -> Shaped[Array, "B P *N"]:
        """The values of each page's head."""
        owner = self.owner
        if isinstance(owner, np.ndarray):
            return x[:, owner]
        owner = owner.reshape(*owner.shape, *(1,) * (x.ndim - 2))
        return jnp.take_along_axis(x, owner, axis=1, mode="promise_in_bounds")

    @property
    def first_slot(self) -> Int[np.ndarray, " P"] | Int[Array, "B P"]:
        """Index, within its head, of each page's first slot; [B, P] where runs are by row."""
        total, page_size = self.pages.shape[1:3]
        first = self.first_page
        if isinstance(first, np.ndarray):
            return ((np.arange(total) - first[self.owner]) * page_size).astype(np.int32)
        return (jnp.arange(total, dtype=jnp.int32) - self.by_page(first)) * jnp.int32(page_size)

    def slots(self) -> Int[Array, "P R"] | Int[Array, "B P R"]:
        """Index of every slot within its head; [B, P, R] where runs are by row."""
        return jnp.asarray(self.first_slot[..., None] + np.arange(self.pages.shape[2], dtype=np.int32))

    def visible(self) -> Bool[Array, "B P R"]:
        """Whether each slot is valid and within the window."""
        slot, length = self.slots(), self.by_page(self.length)[:, :, None]
        visible = slot < length
        if self.first_visible is not None:  # pages before are others', or were read with the block before
            visible &= np.arange(self.pages.shape[1])[:, None] >= self.first_visible[:, None, None]
        if self.window is None:
            return visible
        if self.position is not None and self.query_position is not None:
            return visible & (self.position > self.query_position[:, None, None] - self.window)
        return visible & (slot >= length - self.window)
