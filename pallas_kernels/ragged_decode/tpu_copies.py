"""The TPU kernel's copies: a block's pages into the ring of buffers, and returned scores to their pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.ragged_decode.tpu_refs import LOGITS_BUFFERS, Refs, Static


@dataclasses.dataclass
class _PageCopy:
    """Copy of some of a block's pages, their number known only at run time."""

    source: Callable[[Any, Any], Any]
    target: Callable[[Any, Any], Any]
    semaphore: Any
    first: Array
    pages: Array
    by_page: bool

    def _copy(self, first: Array, pages: Any) -> Any:
        return pltpu.make_async_copy(self.source(first, pages), self.target(first, pages), self.semaphore)

    def _each(self, act: Callable[[Any], None]) -> None:
        if not self.by_page:
            return act(self._copy(self.first, self.pages))

        def one(i: Array, _: None) -> None:
            act(self._copy(self.first + i, 1))

        lax.fori_loop(jnp.int32(0), self.pages, one, None)

    def start(self) -> None:
        self._each(lambda copy: copy.start())

    def wait(self) -> None:
        self._each(lambda copy: copy.wait())


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copies of a core's blocks, by a block's number in the work list, from ``begin`` to that before ``end``."""

    r: Refs
    s: Static
    begin: Array
    end: Array

    def _live(self, w: Array) -> Array:
        """Pages of an item's block up to the last one with slots of its segment."""
        return self.s.pages_of(self.r.high[w] + jnp.int32(self.s.page_size - 1))

    def _copies(self, w: Array) -> list[Any]:
        r, s, slot, page = self.r, self.s, self.s.ring_slot(w), self.r.page[w]
        copies: list[Any] = [
            _PageCopy(
                source=lambda first, pages: r.kv.at[pl.ds(page + first, pages)],
                target=lambda first, pages: r.kv_ring.at[slot, pl.ds(first, pages)],
                semaphore=r.arrived.at[jnp.int32(0), slot],
                first=jnp.int32(0),
                pages=self._live(w),
                by_page=s.by_page,
            )
        ]
        for i, (stream, ring) in enumerate(((r.v_scale, r.v_scale_ring), (r.position, r.position_ring)), start=1):
            if stream is not None:
                row = lax.div(r.segment[w], jnp.int32(s.heads)) + self.r.first_pages_row()
                source = stream.at[row, pl.ds(page - row * jnp.int32(s.row_pages), s.pages)]
                copies.append(pltpu.make_async_copy(source, ring.at[slot], r.arrived.at[jnp.int32(i), slot]))
        return copies

    def start(self, w: Array) -> None:
        """Begin to copy a block, if it is one of the core's."""

        @pl.when(w < self.end)
        def _() -> None:
            for copy in self._copies(w):
                copy.start()

    def wait(self, w: Array) -> None:
        """Wait until it is there."""

        @pl.when(w < self.end)
        def _() -> None:
            for copy in self._copies(w):
                copy.wait()

    def clear(self, w: Array) -> None:
        """Clear a buffer whose first block does not fill it: 0 times uninitialised memory may be NaN."""

        @pl.when((w < self.end) & (self._live(jnp.minimum(w, self.r.high.shape[0] - 1)) < jnp.int32(self.s.pages)))
        def _() -> None:
            ring = self.r.kv_ring.at[self.s.ring_slot(w)]
            ring[...] = jnp.zeros_like(ring)

    def logits_copy(self, w: Array) -> _PageCopy:
        """Copy of an item's scores to its own pages of the result."""
        r, slot = self.r, self.s.logits_slot(w)
        page, first = r.page[w] - self.r.first_pages_row() * jnp.int32(self.s.row_pages), self.s.pages_of(r.low[w])
        return _PageCopy(
            source=lambda first, pages: r.logits_ring.at[slot, pl.ds(first, pages)],
            target=lambda first, pages: r.logits.at[pl.ds(page + first, pages)],
            semaphore=r.left.at[slot],
            first=first,
            pages=self._live(w) - first,
            by_page=self.s.by_page,
        )

    def send(self, number: Array) -> None:
        """Copy out the scores of the iteration before; a copy between the stages would keep them from overlapping."""
        written, gone = (number - jnp.int32(i * self.s.together) for i in (1, LOGITS_BUFFERS - 1))
        pl.when((written >= self.begin) & (written < self.end))(lambda: self.logits_copy(written).start())
        pl.when(gone >= self.begin)(lambda: self.logits_copy(gone).wait())
