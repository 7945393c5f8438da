"""Sizes of the TPU kernel on each chip: blocks, buffers, strips of queries, and how much work is a core's."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.pages import Columns, Lanes
from pallas_kernels.ragged_decode.decode_problem import Problem
from pallas_kernels.ragged_decode.tpu_refs import LANES, STAGES

#: Of 64 vector registers, those for values that an iteration passes to the next: with more, the compiler spills.
REGISTERS = 40
#: Most queries of one iteration; the state of this many is kept in VMEM, of fewer in registers.
QUERIES = 32
#: Most float32 key channels of a block times 8 queries: 512 slots of 128 lanes; more would spill.
FLOAT32_KEYS = 512 * LANES


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """Block sizes and the division of work.

    Attributes:
      rows: slots of a block, a power of two; reduced where the longest head is shorter or queries are many.
      buffers: blocks in the ring, a power of two, at least 4; increased as ``rows`` is reduced.
      cores: cores that each run an equal part of the work list; by default those that share the chip's memory.
      together: blocks of an iteration, of any heads, a power of two; one where the softmax's state is kept in VMEM.
    """

    rows: int = 512
    buffers: int = 8
    cores: int | None = None
    together: int = 1

    def __post_init__(self) -> None:
        powers = all(_power_of_two(x) == x for x in (self.rows, self.buffers, self.together))
        if not powers or self.buffers <= STAGES * self.together:
            raise ValueError(
                f"{self.rows} rows, {self.buffers} buffers, {self.together} together: give powers of two, and at least "
                f"{_power_of_two(STAGES * self.together + 1)} buffers."
            )

    @classmethod
    def default(cls, device_kind: str, page_size: int, head_dim: int, dtype: DTypeLike) -> Self:
        """Heuristic sizes: a block's schedule is shorter than its copy, and copies in flight cover 1.5 µs of bandwidth.

        Args:
          device_kind: as ``jax.Device.device_kind``; an unknown one gets the smallest sizes.
        """
        chip = chip_of(device_kind)
        lanes = -(-head_dim // LANES) * LANES
        row_bytes = (2 * lanes if head_dim > LANES // 2 else lanes) * jnp.dtype(dtype).itemsize
        rows = max(chip.block_bytes // row_bytes, page_size)
        buffers = STAGES * chip.together + -(-chip.in_flight // (rows * row_bytes))
        return cls(rows, min(_power_of_two(buffers), 16), together=chip.together)


@dataclasses.dataclass(frozen=True)
class _Chip:
    """Properties of a chip that sizes depend on.

    Attributes:
      block_bytes: smallest block whose copy takes about as long as its schedule, from docs/kernels.md.
      in_flight: bytes that memory delivers in 1.5 µs.
      cores: cores that share its memory. float8: whether it converts float8 in hardware. unit: the matrix unit's side.
      float32_rows: most slots of a block of float32 pages; more would spill.
      together: blocks of an iteration.
    """

    block_bytes: int
    in_flight: int
    cores: int = 1
    float8: bool = False
    unit: int = 128
    float32_rows: int = 512
    together: int = 1

    def tile(self, lanes: int) -> tuple[int, int]:
        """Slots and lanes of float32 pages multiplied at a time: more would spill, fewer leave the unit idle."""
        width = min(lanes, self.unit)
        return (LANES * self.unit // width, width)


_KIB = 1024
_UNKNOWN = _Chip(256 * _KIB, 1_200_000)
_CHIPS = {
    "v4": _Chip(256 * _KIB, 1_800_000, cores=2),
    "v5 lite": _Chip(256 * _KIB, 1_200_000),
    "v5e": _Chip(256 * _KIB, 1_200_000),
    "v5": _Chip(256 * _KIB, 3_700_000, cores=2),
    "v6": _Chip(512 * _KIB, 2_500_000, unit=256, float32_rows=256),
    "tpu7": _Chip(1024 * _KIB, 5_500_000, float8=True, unit=256, together=2),
}


def chip_of(device_kind: str) -> _Chip:
    """The properties of a chip, by the name that JAX gives it."""
    return next((chip for name, chip in _CHIPS.items() if name in device_kind.lower()), _UNKNOWN)


def _power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()


def streams_of(p: Problem) -> dict[str, Array]:
    """Numbers that are read for every slot beside its key and value, [B, P, R]."""
    streams = {}
    if p.v_scale is not None:
        streams["v_scale"] = p.v_scale.astype(jnp.float32)
    if p.position is not None and (p.window is not None or p.slopes is not None):
        streams["position"] = p.position.astype(jnp.int32)
    return streams


def block_lanes(p: Problem) -> int:
    """Lanes of a block's rows: E, which of ``Lanes`` holds keys and values."""
    assert not isinstance(p.pages, Columns)
    return p.pages.kv.shape[-1]


def row_lanes(p: Problem) -> int:
    """Lanes that a slot takes."""
    return block_lanes(p) * (1 if isinstance(p.pages, Lanes) else 2)


def fit(config: TpuConfig, p: Problem, device_kind: str = "") -> tuple[int, int, int]:
    """Pages of a block, buffers, and strips of queries that fit this problem's longest head and number of queries."""
    _, total, page_size, _ = p.pages.shape
    longest = min(max(p.runs), total) * page_size
    lanes = block_lanes(p)
    # Scores are returned a block at a time, for all queries together. For float32 pages an iteration takes one register
    # of queries: with more, parts would spill.
    float32 = p.pages.dtype == jnp.float32
    at_most = 8 if float32 else QUERIES
    strips = 1 if p.with_logits else _power_of_two(-(-p.q.shape[2] // at_most))
    queries = -(-p.q.shape[2] // (8 * strips))
    # Registers for peak, mass, decay and the sum of values; a score and its bfloat16 weight for every slot.
    state = queries * (3 + lanes // LANES)
    rows, buffers = config.rows, config.buffers
    least = max(LANES, page_size)
    # Blocks of streams do not extend into the next row, so they are at most a row's pages.
    longest_block = total * page_size if streams_of(p) else rows
    most = min(FLOAT32_KEYS // (lanes * queries), chip_of(device_kind).float32_rows) if float32 else rows

    def too_many(rows: int) -> bool:
        return rows > min(most, longest_block) or state + queries * rows * 3 // (2 * LANES) > REGISTERS

    while rows > least and (rows // 2 >= longest or too_many(rows)):
        rows, buffers = rows // 2, min(2 * buffers, 32)
    return max(rows, least) // page_size, buffers, strips


def in_memory(p: Problem) -> bool:
    """Whether iterations pass the softmax's state on in VMEM."""
    return p.pages.dtype == jnp.float32 or p.q.shape[2] >= QUERIES


def blocks_together(config: TpuConfig, p: Problem) -> int:
    """Blocks of an iteration for this problem."""
    return 1 if in_memory(p) else config.together
