"""Pallas TPU kernel: one program per core walks the work list and copies blocks of pages through a ring of buffers.

- One program with its own ring costs 60 cycles per block beside the arithmetic; a grid with block specs took 300
  instructions (v5e, v6e, tpu7x; libtpu 0.0.42).
- Only pages that hold slots of the segment are copied; the rest of a buffer keeps an earlier block's rows. They are
  finite, so values need no mask: their weights are 0. Keys past the length may have any value, NaN included.
- The page size, from 16 slots to 128, does not change the schedule: a block is one copy.
- Streams of one number per slot (value scales, positions, scores) need pages of 128 slots: smaller rows would be padded
  to 128 lanes in memory, and moved between lanes for use. They are read in place where the pages of a row are a
  multiple of 8; else XLA may give [B, P, R] another layout, and copies it (4 bytes per slot).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import checks, dispatch, tuned
from pallas_kernels.pages import Columns, Lanes, Stacked
from pallas_kernels.ragged_decode.decode_problem import Decoded, Problem
from pallas_kernels.ragged_decode.tpu_kernel import LANES, LOGITS_BUFFERS, STAGES, Static, kernel
from pallas_kernels.ragged_decode.worklist import WorkList, most_items, work_list
from pallas_kernels.softmax import NEG
from pallas_kernels.tpu.bfloat16_parts import stacked_parts

#: Scalar memory is 1 MiB, and 900 KiB of prefetched scalars compile (libtpu 0.0.42, v5e).
SCALAR_BYTES = 900 * 1024
#: VMEM for queries, results and rings, of 62 MiB (v5p, tpu7x) or 126 MiB (v5e, v6e).
VECTOR_BYTES = 48 * 1024 * 1024
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
        chip = _chip(device_kind)
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


def _chip(device_kind: str) -> _Chip:
    return next((chip for name, chip in _CHIPS.items() if name in device_kind.lower()), _UNKNOWN)


def _power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()


def decode(problem: Problem, *, config: TpuConfig | None = None, interpret: Any = False) -> Decoded:
    """See :func:`pallas_kernels.ragged_decode.ragged_decode`.

    Args:
      interpret: True, or ``pltpu.InterpretParams``, to run anywhere.

    Raises:
      NotImplementedError: this kernel cannot do it; the message says why.
    """
    p = problem
    _, total, page_size, _ = p.pages.shape
    _check(p)
    kind = dispatch.device_kind()
    if config is None:
        rule = TpuConfig.default(kind, page_size, row_lanes(p) // 2, p.pages.dtype)
        config = tuned.config("ragged_decode.tpu", p, TpuConfig) or rule
    chip = _chip(kind)
    if "float8" in p.pages.dtype.name and not (chip.float8 or interpret):
        raise NotImplementedError(f"float8 pages are converted number by number on {kind}; store int8.")
    p = _two_queries(p)
    pages, buffers, strips = fit(config, p, kind)
    by_slot = p.window is not None and p.position is None
    streams = _streams(p)
    items = _items(p, pages, by_slot, clamp=bool(streams))
    float32 = p.pages.dtype == jnp.float32
    queries, in_memory = p.q.shape[2], _in_memory(p)
    if in_memory:
        queries = -(-queries // (8 * strips)) * 8
    static = Static(
        page_size=page_size,
        pages=pages,
        row_pages=total,
        heads=p.q.shape[1],
        buffers=buffers,
        cores=config.cores or chip.cores,
        stacked=isinstance(p.pages, Stacked),
        tile=chip.tile(_block_lanes(p)) if float32 else None,
        queries=queries,
        strips=strips,
        in_memory=in_memory,
        together=blocks_together(config, p),
        scale=p.scale,
        soft_cap=p.soft_cap,
        window=None if by_slot else p.window,
        logits_scale=p.logits_scale,
        by_page=interpret is True,
    )
    out, lse, logits = _call(p, static, items, streams, interpret)
    decoded = _decoded(p, out, lse, logits)
    if p is problem:
        return decoded
    logits = None if decoded.logits is None else decoded.logits[:, :, :1]
    return Decoded(decoded.out[:, :, :1], decoded.lse[:, :, :1], logits)


def _two_queries(p: Problem) -> Problem:
    """Add a second query of zeros where heads have only one: JAX 0.12's Mosaic cannot broadcast one row to sublanes.

    A register has 8 rows anyway, so this costs only the extra row of scores, where these are returned.
    """
    if p.q.shape[2] != 1:
        return p
    slopes = None if p.slopes is None else np.pad(p.slopes, ((0, 0), (0, 1)))
    return dataclasses.replace(p, q=jnp.pad(p.q, ((0, 0), (0, 0), (0, 1), (0, 0))), slopes=slopes)


def _check(p: Problem) -> None:
    checks.compiled_in(p.scale, p.logits_scale, p.soft_cap)
    if isinstance(p.pages, Columns):
        raise NotImplementedError("The TPU kernel reads stacked pages or lanes, not columns.")
    page_size, dtype = p.pages.shape[2], jnp.dtype(p.pages.dtype)
    lanes = p.pages.kv.shape[-1]
    if lanes % LANES:
        raise NotImplementedError(f"Rows of {lanes} lanes are not whole registers; pad heads to 128, or use lanes.")
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.int8) and "float8" not in dtype.name:
        raise NotImplementedError(f"The TPU kernel reads float32, bfloat16, int8 or float8 pages, not {dtype.name}.")
    if page_size & (page_size - 1) or page_size * dtype.itemsize < 32:
        raise NotImplementedError(f"Pages of {page_size} {dtype.name} slots are not whole tiles of a power of two.")
    if (_streams(p) or p.with_logits) and page_size % LANES:
        raise NotImplementedError(f"Numbers beside every slot need pages of {LANES} slots, not {page_size}.")


def _streams(p: Problem) -> dict[str, Array]:
    """Numbers that are read for every slot beside its key and value, [B, P, R]."""
    streams = {}
    if p.v_scale is not None:
        streams["v_scale"] = p.v_scale.astype(jnp.float32)
    if p.position is not None and (p.window is not None or p.slopes is not None):
        streams["position"] = p.position.astype(jnp.int32)
    return streams


def _block_lanes(p: Problem) -> int:
    """Lanes of a block's rows: E, which of ``Lanes`` holds keys and values."""
    assert not isinstance(p.pages, Columns)
    return p.pages.kv.shape[-1]


def row_lanes(p: Problem) -> int:
    """Lanes that a slot takes."""
    return _block_lanes(p) * (1 if isinstance(p.pages, Lanes) else 2)


def fit(config: TpuConfig, p: Problem, device_kind: str = "") -> tuple[int, int, int]:
    """Pages of a block, buffers, and strips of queries that fit this problem's longest head and number of queries."""
    _, total, page_size, _ = p.pages.shape
    longest = min(max(p.runs), total) * page_size
    lanes = _block_lanes(p)
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
    longest_block = total * page_size if _streams(p) else rows
    most = min(FLOAT32_KEYS // (lanes * queries), _chip(device_kind).float32_rows) if float32 else rows

    def too_many(rows: int) -> bool:
        return rows > min(most, longest_block) or state + queries * rows * 3 // (2 * LANES) > REGISTERS

    while rows > least and (rows // 2 >= longest or too_many(rows)):
        rows, buffers = rows // 2, min(2 * buffers, 32)
    return max(rows, least) // page_size, buffers, strips


def _in_memory(p: Problem) -> bool:
    """Whether iterations pass the softmax's state on in VMEM."""
    return p.pages.dtype == jnp.float32 or p.q.shape[2] >= QUERIES


def blocks_together(config: TpuConfig, p: Problem) -> int:
    """Blocks of an iteration for this problem."""
    return 1 if _in_memory(p) else config.together


def _items(p: Problem, pages: int, by_slot: bool, clamp: bool) -> WorkList:
    batch, (rows, total, page_size, _) = p.q.shape[0], p.pages.shape
    row = jnp.arange(batch, dtype=jnp.int32)
    row = row if p.first_row is None else row + p.first_row
    start = row[:, None] * jnp.int32(total) + jnp.asarray(p.first_page)
    length = p.length.reshape(-1).astype(jnp.int32)
    return work_list(
        start.reshape(-1),
        length,
        page_size=page_size,
        pages_per_item=pages,
        max_items=most_items(p.runs, batch, pages, total if p.by_row else None),
        # Pages are copied only up to the last valid one, so blocks may extend past the pool; streams are copied whole.
        total_pages=rows * total + pages,
        row_pages=total if clamp else None,
        first=jnp.maximum(length - jnp.int32(p.window), 0) if by_slot and p.window is not None else None,
    )


def _queries(p: Problem, s: Static) -> Float[Array, "S G E"]:
    batch, heads, group, dim = p.q.shape
    q = p.q.astype(jnp.float32)
    if p.k_scale is not None:
        q = q * p.k_scale[:, :, None]
    assert not isinstance(p.pages, Columns)
    q = q if s.tile else q.astype(jnp.bfloat16)
    q = jnp.pad(q.reshape(batch * heads, group, dim), ((0, 0), (0, 0), (0, p.pages.kv.shape[-1] - dim)))
    q = _in_strips(q, s)
    return stacked_parts(q) if s.tile else q


def _in_strips(x: Array, s: Static) -> Array:
    """Reshape [N, G, E] to [N strips, queries, E]."""
    x = jnp.pad(x, ((0, 0), (0, s.queries * s.strips - x.shape[1]), (0, 0)))
    return x.reshape(-1, s.queries, x.shape[2])


def _call(
    p: Problem, s: Static, items: WorkList, streams: dict[str, Array], interpret: Any
) -> tuple[Array, Array, Array | None]:
    """Results of every core, [C, S, G, E] and [C, S, 128], and scores by page."""
    batch, heads, group, _ = p.q.shape
    segments, total = batch * heads, s.row_pages
    assert not isinstance(p.pages, Columns)
    kv = p.pages.kv.reshape(-1, *p.pages.kv.shape[2:])
    lanes = kv.shape[-1]
    whole, device = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)

    scalars = {
        "count": items.count,
        "segment": items.segment,
        "page": items.page,
        "low": items.low,
        "high": items.high,
        "flags": items.flags,
    }
    if p.first_row is not None:
        scalars["first_row"] = p.first_row.reshape(1).astype(jnp.int32)
    if p.log_mass is not None:
        scalars["log_mass"] = p.log_mass.reshape(-1).astype(jnp.float32)
    if "position" in streams:
        assert p.query_position is not None
        scalars["query_position"] = p.query_position.astype(jnp.int32)
    scalar_bytes = sum(4 * x.size for x in scalars.values())
    if scalar_bytes > SCALAR_BYTES:
        raise NotImplementedError(
            f"The work list is {scalar_bytes} bytes, and scalar memory holds {SCALAR_BYTES}; use larger blocks."
        )

    inputs: dict[str, tuple[Array, pl.BlockSpec]] = {"q": (_queries(p, s), whole)}
    if p.slopes is not None:
        slopes = jnp.asarray(p.slopes, jnp.float32)[:, :, None]
        inputs["slopes"] = (_in_strips(jnp.broadcast_to(slopes, (heads, group, LANES)), s), whole)

    # Constrained to HBM: XLA may otherwise place a small array in VMEM, and copy it there in loops. Outside of jit it
    # is in HBM, and JAX 0.10 does not accept the constraint.
    def in_device(x: Array) -> Array:
        if interpret or not isinstance(x, Tracer):
            return x
        return pltpu.with_memory_space_constraint(x, memory_space=pltpu.HBM)

    inputs |= {name: (in_device(x), device) for name, x in streams.items()}
    inputs["kv"] = (in_device(kv), device)

    written = (segments * s.strips, group if s.strips == 1 else s.queries, lanes)
    # A core's results are 0 for the other core's heads; both have results for the head that is split between them.
    outputs: dict[str, tuple[Any, pl.BlockSpec]] = {
        "out": (jax.ShapeDtypeStruct((s.cores, *written), p.q.dtype), _by_core(*written)),
        "lse": (jax.ShapeDtypeStruct((s.cores, written[0], LANES), jnp.float32), _by_core(written[0], LANES)),
    }
    scratch: dict[str, Any] = {
        "kv_ring": pltpu.VMEM((s.buffers, s.pages, *kv.shape[1:]), kv.dtype),
        "arrived": pltpu.SemaphoreType.DMA((3, s.buffers)),
        "zeros": pltpu.VMEM((s.queries, LANES), jnp.float32),
    }
    if s.in_memory:
        scratch["softmax"] = pltpu.VMEM((2 * s.strips, 2, s.queries, LANES), jnp.float32)
        scratch["sums"] = pltpu.VMEM((2 * s.strips, 4, s.queries, lanes), jnp.float32)
    if s.waiting:
        scratch["scores"] = pltpu.VMEM((s.together, s.queries, s.rows), jnp.float32)
        scratch["weights"] = pltpu.VMEM((s.together, s.queries, s.rows), jnp.bfloat16)
    scratch |= {f"{name}_ring": pltpu.VMEM((s.buffers, s.pages, s.page_size), x.dtype) for name, x in streams.items()}
    aliases = {}
    if p.with_logits:
        by_page = jax.ShapeDtypeStruct((batch * total, group, s.page_size), jnp.float32)
        # Slots that no block covers are masked: they keep the buffer's initial NEG.
        aliases = {len(scalars) + len(inputs): len(outputs)}
        inputs[""] = (jnp.full(by_page.shape, NEG, by_page.dtype), device)
        outputs["logits"] = (by_page if interpret else pltpu.HBM(by_page.shape, by_page.dtype), device)
        sent = LOGITS_BUFFERS * s.together
        scratch["logits_ring"] = pltpu.VMEM((sent, s.pages, group, s.page_size), jnp.float32)
        scratch["left"] = pltpu.SemaphoreType.DMA((sent,))
    _check_vector_memory(inputs, outputs, scratch)

    slots = batch * total * s.page_size
    results = pl.pallas_call(
        functools.partial(kernel, names=(*scalars, *inputs, *outputs, *scratch), static=s),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(s.cores,),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[shape for shape, _ in outputs.values()],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            # Every index comes from the work list; checks would be 30 of 330 cycles per block on v6e.
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * slots * group * lanes,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x, _ in inputs.values()),
            transcendentals=slots * group,
        ),
        interpret=interpret,
        name="ragged_decode",
    )(*scalars.values(), *(x for x, _ in inputs.values()))
    out, lse, *logits = results
    return out, lse, logits[0] if logits else None


def _by_core(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, *shape), lambda core, *_: (core, *(0 for _ in shape)))


def _check_vector_memory(inputs: Any, outputs: Any, scratch: Any) -> None:
    """Raise ``NotImplementedError`` where buffers exceed VMEM; arrays are padded to tiles, results double-buffered."""

    def nbytes(shape: tuple[int, ...], dtype: Any) -> int:
        *major, rows, lanes = shape
        return int(np.prod(major)) * max(rows, 8) * max(lanes, LANES) * jnp.dtype(dtype).itemsize

    held = sum(nbytes(x.shape, x.dtype) for name, (x, _) in inputs.items() if name in ("q", "slopes"))
    held += sum(2 * nbytes(x.shape[1:], x.dtype) for name, (x, _) in outputs.items() if name in ("out", "lse"))
    held += sum(nbytes(x.shape, x.dtype) for name, x in scratch.items() if name.endswith("ring"))
    if held > VECTOR_BYTES:
        raise NotImplementedError(f"Queries, results and buffers are {held} bytes; vector memory holds {VECTOR_BYTES}.")


def _decoded(p: Problem, out: Array, lse: Array, logits: Array | None) -> Decoded:
    """Merge the cores' results by log-sum-exp: a head may be split between two."""
    batch, heads, group, key_dim = p.q.shape
    dim = p.pages.shape[3]
    out = out[..., key_dim : key_dim + dim] if isinstance(p.pages, Lanes) else out[..., :dim]
    lse = lse[..., : out.shape[2]]
    if out.shape[1] != batch * heads:  # Strips of a head's queries; the last may be padded.
        out = out.reshape(out.shape[0], batch * heads, -1, dim)[:, :, :group]
        lse = lse.reshape(out.shape[0], batch * heads, -1)[..., :group]
    if out.shape[0] > 1:
        peak = lse.max(axis=0)
        weight = jnp.exp(lse - peak)
        mass = weight.sum(axis=0)
        out = jnp.sum(weight[..., None] * out.astype(jnp.float32), axis=0) / mass[..., None]
        lse = jnp.where(peak > NEG, peak + jnp.log(mass), NEG)
    out = out.reshape(batch, heads, group, dim).astype(p.q.dtype)
    if logits is not None:
        logits = logits.reshape(batch, -1, group, logits.shape[-1])
    return Decoded(out, lse.reshape(batch, heads, group), logits)
