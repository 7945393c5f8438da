"""The arguments of the TPU kernel: static parameters, and operands, results and buffers by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.tpu.bfloat16_parts import PARTS

LANES = 128
#: Pipeline stages: blocks in use at once, whose buffers cannot be refilled.
STAGES = 3
#: Buffers of returned scores: written in one iteration, copied out from the next on, and free two iterations later.
LOGITS_BUFFERS = 4


@dataclasses.dataclass(frozen=True)
class Static:
    """Static parameters of the kernel.

    Attributes:
      page_size: slots of a page. pages: pages of a block. row_pages: pages of a batch row. heads: heads of a batch row.
      buffers: blocks in the ring, a power of two. cores: cores among which the work list is divided.
      stacked: whether keys and values are separate rows of a page; else they are lanes of the same row.
      tile: slots and lanes of float32 pages that are multiplied at a time; None for other pages, which are multiplied
        in bfloat16 as they are.
      queries: queries of an iteration. strips: iterations for all queries of a head, a power of two.
      in_memory: whether iterations pass the softmax's state on in VMEM; else in registers.
      together: blocks of an iteration, a power of two; more than one wait for the next stage in VMEM.
      by_page: copy page by page, for the interpreter, which has no copies of a size known only at run time.
    """

    page_size: int
    pages: int
    row_pages: int
    heads: int
    buffers: int
    cores: int
    stacked: bool
    tile: tuple[int, int] | None
    queries: int
    strips: int
    in_memory: bool
    together: int
    scale: float
    soft_cap: float | None
    window: int | None
    logits_scale: float | None
    by_page: bool

    @property
    def rows(self) -> int:
        return self.page_size * self.pages

    @property
    def waiting(self) -> bool:
        """Whether a block's scores and weights wait for the next stage in VMEM; else in registers."""
        return self.together > 1

    @property
    def parts(self) -> int:
        return 1 if self.tile is None else PARTS

    # Where things are, by the number of a block in the work list (w) or of an item, a block's strip of queries (t).

    def ring_slot(self, w: Array) -> Array:
        """The ring's buffer of a block."""
        return w & jnp.int32(self.buffers - 1)

    def logits_slot(self, w: Array) -> Array:
        """The buffer of a block's returned scores."""
        return w & jnp.int32(LOGITS_BUFFERS * self.together - 1)

    def block(self, t: Array) -> Array:
        """The block of an item."""
        return t if self.strips == 1 else lax.shift_right_logical(t, jnp.int32(self.strips.bit_length() - 1))

    def strip(self, t: Array) -> Array:
        """The strip of an item."""
        return t & jnp.int32(self.strips - 1)

    def of_strip(self, head: Array, t: Array) -> Array:
        """Index of a head's queries of this item, in arrays by head and strip."""
        return head if self.strips == 1 else head * jnp.int32(self.strips) + self.strip(t)

    def state_slots(self, t: Array) -> tuple[Array, Array]:
        """Slots of the state buffers for an item and for the block before it."""
        odd, strip = self.block(t) & jnp.int32(1), self.strip(t) * jnp.int32(2)
        return strip + odd, strip + (odd ^ jnp.int32(1))

    def pages_of(self, slots: Array) -> Array:
        """Whole pages in ``slots``, by a shift: a signed division takes ten instructions."""
        return lax.shift_right_logical(slots, jnp.int32(self.page_size.bit_length() - 1))


@dataclasses.dataclass
class Refs:
    """Operands, results and scratch buffers by name; ``None`` for those that this variant does not have.

    Scalars: count [1] and the work list [W]; first_row [1]; log_mass [S]; query_position [B].
    Vector memory: q [S, G, E], of float32 pages its parts [S, 3G, E]; slopes [H, G, 128]; out [S, G, E]; lse [S, 128],
      query g in lane g. Where queries are in strips, S and H count strips of G.
    Device memory: kv [B P, 2, R, E] or [B P, R, E]; v_scale, position [B, P, R]; logits [B P, G, R].
    Scratch: kv_ring, v_scale_ring and position_ring with semaphores arrived [3, N]; logits_ring with left [4];
      zeros [G, 128]; by strip, of this block and the one before, softmax [2 strips, 2, G, 128] (peak, mass) and
      sums [2 strips, 4, G, E] (sum of values; decay, peak, mass). Of several blocks of an iteration, scores [K, G, N]
      and weights [K, G, N].
    """

    count: Any
    segment: Any
    page: Any
    low: Any
    high: Any
    flags: Any
    q: Any
    kv: Any
    out: Any
    lse: Any
    kv_ring: Any
    arrived: Any
    zeros: Any
    softmax: Any = None
    sums: Any = None
    scores: Any = None
    weights: Any = None
    first_row: Any = None
    log_mass: Any = None
    query_position: Any = None
    slopes: Any = None
    v_scale: Any = None
    position: Any = None
    logits: Any = None
    v_scale_ring: Any = None
    position_ring: Any = None
    logits_ring: Any = None
    left: Any = None

    def first_pages_row(self) -> Array:
        """Row of the pages that the queries' row 0 belongs to."""
        return jnp.int32(0) if self.first_row is None else self.first_row[0]
