"""Pallas Mosaic GPU kernel for Hopper GPUs (compute capability 9.0): rows of 16 bits in pages of 64.

One warpgroup per thread block reads one item (``split.py``) page by page. The tensor memory accelerator keeps
``config.stages`` pages of keys and values in flight to shared memory, in the tiled layout that WGMMA reads, so that no
thread computes an address. There is no second warpgroup that only copies: a thread block then needs so few registers
and bytes that two or three run on a multiprocessor, and while one waits for its softmax another multiplies.

WGMMA's smallest product has 64 rows. Only the rows of real queries are loaded and stored; the others hold whatever was
in shared memory, and never mix with these.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels import argument_checks, tuned
from pallas_kernels.gpu import chip
from pallas_kernels.pages import Stacked
from pallas_kernels.ragged_decode import split
from pallas_kernels.ragged_decode.decode_problem import Decoded, Problem
from pallas_kernels.ragged_decode.split import Split
from pallas_kernels.softmax import NEG

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:  # jaxlib built without GPU support
    plgpu: Any = None

#: Rows of a WGMMA product, and slots of a page.
ROWS = 64
#: The widest rows that this JAX lowers. 0.12 searches for a layout of every array in shared memory, and for a result of
#: 256 lanes finds none within minutes; for 128 lanes, and in 0.11 also for 256, it takes milliseconds.
WIDEST = 256 if jax.__version_info__ < (0, 12) else 128


@dataclasses.dataclass(frozen=True)
class MosaicGpuConfig:
    """Sizes of the kernel.

    Attributes:
      pages: pages of an item. stages: pages in flight.
    """

    pages: int
    stages: int = 2

    def __post_init__(self) -> None:
        if self.pages < 1 or self.stages < 1:
            raise ValueError(f"{self.pages} pages, {self.stages} in flight: give at least 1.")

    @classmethod
    def of(cls, p: Problem) -> MosaicGpuConfig:
        """Two pages in flight, four for small heads: 64 KB, so a multiprocessor runs two or three thread blocks."""
        page_bytes = ROWS * p.pages.row_nbytes
        return cls(split.pages_per_item(p), max(min((64 << 10) // page_bytes, 4), 2))


def decode(p: Problem, *, config: MosaicGpuConfig | None = None, interpret: Any = False) -> Decoded:
    """See :func:`pallas_kernels.ragged_decode.ragged_decode`.

    Args:
      interpret: ``True``, or the interpreter's own parameters.

    Raises:
      NotImplementedError: another GPU than Hopper, rows other than ``Stacked`` in bfloat16 or float16 with pages of
        64, queries in another dtype, more than 64 queries a head, scales of values, positions.
    """
    pages = _accepted(p)
    config = config or tuned.config("ragged_decode.mosaic_gpu", p, MosaicGpuConfig) or MosaicGpuConfig.of(p)
    cut = Split.of(p, config.pages)
    batch, _, group, dim = p.q.shape
    total, lanes = pages.shape[1], pages.kv.shape[-1]
    # Copies are of whole tiles of 8 rows.
    loaded = -(-group // 8) * 8
    q = jnp.pad(split.queries(p, pages.dtype), ((0, 0), (0, 0), (0, loaded - group), (0, lanes - dim)))
    given = {
        "table": jnp.asarray(cut.table),
        "length": p.length,
        "log_mass": p.log_mass,
        "q": q,
        "kv": pages.kv.reshape(-1, *pages.kv.shape[2:]),
    }
    given = {name: x for name, x in given.items() if x is not None}
    made = {
        "out": jax.ShapeDtypeStruct((batch, cut.items, group, lanes), jnp.float32),
        "lse": jax.ShapeDtypeStruct((batch, cut.items, loaded), jnp.float32),
    }
    if p.with_logits:
        made["logits"] = jax.ShapeDtypeStruct((batch * total, group, ROWS), jnp.float32)
    scratch = _scratch(p, config.stages, lanes, bool(interpret))
    kernel = functools.partial(
        _kernel,
        names=(*given, *made),
        rows=cut.rows,
        row_pages=total,
        stages=config.stages,
        scale=p.scale,
        logits_scale=p.scale if p.logits_scale is None else p.logits_scale,
        soft_cap=p.soft_cap,
        window=p.window,
        arithmetic=_Interpreted if interpret else _Compiled,
    )
    # plgpu.kernel takes no cost estimate.
    results = plgpu.kernel(
        _named(kernel, "ragged_decode_mosaic_gpu"),
        out_type=list(made.values()),
        grid=(cut.items, batch),
        grid_names=("item", "row"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({"interpret": _interpreter(interpret)} if interpret else {}),
    )(*given.values())
    out, lse = results[0][..., :dim], results[1][..., :group]
    logits = results[2].reshape(batch, total, group, ROWS) if p.with_logits else None
    return split.merged(p, cut, out, lse, logits)


def _accepted(p: Problem) -> Stacked:
    """Check that this kernel can do the problem; returns its pages."""
    target = chip.target()
    capability = target.capability
    argument_checks.compiled_in(p.scale, p.logits_scale, p.soft_cap)
    if p.first_row is not None:
        raise NotImplementedError("GPU kernels take queries of all rows of the pages.")
    if plgpu is None:
        raise NotImplementedError("this jaxlib has no Pallas Mosaic GPU backend.")
    if not target.nvidia:
        raise NotImplementedError(f"WGMMA is NVIDIA's; this GPU is {target.kind}.")
    if capability is not None and capability != (9, 0):
        raise NotImplementedError(f"WGMMA needs compute capability 9.0, this GPU has {capability[0]}.{capability[1]}.")
    if not isinstance(p.pages, Stacked):
        raise NotImplementedError("the Mosaic GPU kernel reads pages of keys, then values.")
    if p.pages.dtype not in (jnp.bfloat16, jnp.float16) or p.q.dtype != p.pages.dtype:
        raise NotImplementedError(f"WGMMA multiplies 16-bit rows, not {p.pages.dtype} by {p.q.dtype}.")
    if p.pages.shape[2] != ROWS:
        raise NotImplementedError(f"the Mosaic GPU kernel reads pages of {ROWS} slots, not {p.pages.shape[2]}.")
    if p.pages.kv.shape[-1] % 16 or p.pages.kv.shape[-1] > WIDEST:
        raise NotImplementedError(
            f"WGMMA takes multiples of 16 up to {WIDEST} lanes (JAX {jax.__version__}), not {p.pages.kv.shape[-1]}."
        )
    if p.q.shape[2] > ROWS:
        raise NotImplementedError(f"{p.q.shape[2]} queries a head do not fit one product of {ROWS} rows.")
    if p.v_scale is not None or p.slopes is not None or (p.window is not None and p.position is not None):
        raise NotImplementedError("the Mosaic GPU kernel reads neither scales of values nor positions.")
    return p.pages


def _scratch(p: Problem, stages: int, lanes: int, interpret: bool) -> dict[str, Any]:
    """Shared memory; the result reuses the memory of the pages, except in the interpreter, which cannot."""
    dtype = p.pages.dtype
    # The widest tile of lanes that divides a row: 128, 64 or 32 bytes.
    tile = next(n for n in (64, 32, 16) if lanes % n == 0)
    tiled = (plgpu.TilingTransform((8, tile)), plgpu.SwizzleTransform(2 * tile))
    pages = tuple(plgpu.SMEM((stages, ROWS, lanes), dtype, transforms=tiled) for _ in range(2))
    out = plgpu.SMEM((ROWS, lanes), jnp.float32)
    scratch = {
        "q_tile": plgpu.SMEM((ROWS, lanes), dtype, transforms=tiled),
        "tiles": (pages, out) if interpret else plgpu.RefUnion(pages, out),
        "lse_tile": plgpu.SMEM((ROWS,), jnp.float32),
        "q_here": plgpu.Barrier(),
        "k_here": plgpu.Barrier(num_barriers=stages),
        "v_here": plgpu.Barrier(num_barriers=stages),
    }
    if p.with_logits:
        scratch["logits_tile"] = plgpu.SMEM((ROWS, ROWS), jnp.float32)
    return scratch


def _named(kernel: Any, name: str) -> Any:
    kernel.__name__ = name
    return kernel


def _interpreter(interpret: Any) -> Any:
    if interpret is not True:
        return interpret
    if not hasattr(plgpu, "InterpretGPUParams"):
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        return InterpretGPUParams()
    return plgpu.InterpretGPUParams()


class _Compiled:
    """Products and array layouts of the compiled kernel."""

    @staticmethod
    def spread(x: Array, *reduced: int) -> Array:
        """Give ``x`` the layout of a product's result, or of one with ``reduced`` axes reduced."""
        return plgpu.layout_cast(x, plgpu.Layout.WGMMA.reduce(*reduced) if reduced else plgpu.Layout.WGMMA)

    @staticmethod
    def columns() -> Array:
        """[64, 64] index of each column."""
        return plgpu.broadcasted_iota(jnp.int32, (ROWS, ROWS), 1, layout=plgpu.Layout.WGMMA)

    @staticmethod
    def scores(q_tile: Any, k_tile: Any) -> Array:
        """q @ k.T, both in shared memory."""

        def multiply(result: Any) -> Array:
            plgpu.wgmma(result, q_tile, k_tile.T)
            return result[...]

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, ROWS), jnp.float32))

    @staticmethod
    def added(acc: Array, weight: Array, v_tile: Any) -> Array:
        """acc + weight @ v, values in shared memory."""

        def multiply(result: Any) -> None:
            plgpu.wgmma(result, weight, v_tile)

        return pl.run_state(multiply)(plgpu.ACC.init(acc))


class _Interpreted:
    """The same operations for the interpreter, without layouts or initialised accumulators (JAX 0.10.2).

    Unlike those of WGMMA, its reads of shared memory must be committed before a copy may overwrite what they read.
    """

    @staticmethod
    def spread(x: Array, *reduced: int) -> Array:
        del reduced
        return x

    @staticmethod
    def columns() -> Array:
        return lax.broadcasted_iota(jnp.int32, (ROWS, ROWS), 1)

    @staticmethod
    def scores(q_tile: Any, k_tile: Any) -> Array:
        result = jnp.dot(q_tile[...], k_tile[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return result

    @staticmethod
    def added(acc: Array, weight: Array, v_tile: Any) -> Array:
        result = acc + jnp.dot(weight, v_tile[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return result


def _kernel(
    *refs: Any,
    names: tuple[str, ...],
    rows: int,
    row_pages: int,
    stages: int,
    scale: float,
    logits_scale: float,
    soft_cap: float | None,
    window: int | None,
    arithmetic: type[_Compiled] | type[_Interpreted],
    **scratch: Any,
) -> None:
    """Attention over one item's visible slots: ``out``, ``lse``, and the scores if there is a ``logits``."""
    at = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch)
    (at.k_tile, at.v_tile), at.out_tile = at.tiles
    given = set(names)
    group, lanes = at.out.shape[2:]
    loaded = at.q.shape[2]
    item, row = lax.axis_index("item"), lax.axis_index("row")
    head, page, first_slot = split.at_item(at.table, row, item)
    length = at.length[row, head]
    high = jnp.clip(length - first_slot, jnp.int32(0), jnp.int32(rows))
    low = jnp.int32(0)
    if window is not None:
        low = jnp.clip(length - jnp.int32(window) - first_slot, jnp.int32(0), jnp.int32(rows))
    first = lax.div(low, jnp.int32(ROWS))
    steps = lax.div(high + jnp.int32(ROWS - 1), jnp.int32(ROWS)) - first
    first_page = row * jnp.int32(row_pages) + page + first

    @pl.when(high <= low)
    def _nothing() -> None:
        at.lse_tile[...] = arithmetic.spread(jnp.full((ROWS,), NEG, jnp.float32), 1)
        _send(at.lse_tile.at[pl.ds(0, loaded)], at.lse.at[row, item])

    def fetch_keys(step: Array | int, slot: Array | int) -> None:
        plgpu.copy_gmem_to_smem(at.kv.at[first_page + step, 0], at.k_tile.at[slot], at.k_here.at[slot])

    def fetch_values(step: Array | int, slot: Array | int) -> None:
        plgpu.copy_gmem_to_smem(at.kv.at[first_page + step, 1], at.v_tile.at[slot], at.v_here.at[slot])

    def keep(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, mass, acc = carry
        slot = lax.rem(step, jnp.int32(stages))
        more = step + jnp.int32(stages) < steps
        plgpu.barrier_wait(at.k_here.at[slot])
        raw = arithmetic.scores(at.q_tile, at.k_tile.at[slot])
        pl.when(more)(lambda: fetch_keys(step + jnp.int32(stages), slot))
        column = arithmetic.columns() + (first + step) * jnp.int32(ROWS)

        def score(by: float) -> Array:
            s = raw * jnp.float32(by)
            if soft_cap is not None:
                s = jnp.float32(soft_cap) * jnp.tanh(s * jnp.float32(1 / soft_cap))
            if "log_mass" in given:
                s = jnp.where(column + first_slot == 0, s + at.log_mass[row, head], s)
            return s

        s = score(scale)
        if "logits" in given:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            at.logits_tile[...] = s if logits_scale == scale else score(logits_scale)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(at.logits_tile.at[pl.ds(0, group)], at.logits.at[first_page + step])
        s = jnp.where(column < high, s, jnp.float32(NEG))
        if window is not None:
            s = jnp.where(column >= low, s, jnp.float32(NEG))
        new_peak = jnp.maximum(peak, s.max(axis=1))
        weight = jnp.exp(s - lax.broadcast_in_dim(new_peak, s.shape, [0]))
        fade = jnp.exp(peak - new_peak)
        mass = mass * fade + weight.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
        plgpu.barrier_wait(at.v_here.at[slot])
        acc = arithmetic.added(acc, weight.astype(at.kv.dtype), at.v_tile.at[slot])
        pl.when(more)(lambda: fetch_values(step + jnp.int32(stages), slot))
        return new_peak, mass, acc

    @pl.when(high > low)
    def _attend() -> None:
        plgpu.copy_gmem_to_smem(at.q.at[row, head], at.q_tile.at[pl.ds(0, loaded)], at.q_here)
        for step in range(stages):

            @pl.when(steps > step)
            def _fetch(step: int = step) -> None:
                fetch_keys(step, step)
                fetch_values(step, step)

        plgpu.barrier_wait(at.q_here)
        start = (
            arithmetic.spread(jnp.full((ROWS,), NEG, jnp.float32), 1),
            arithmetic.spread(jnp.zeros((ROWS,), jnp.float32), 1),
            arithmetic.spread(jnp.zeros((ROWS, lanes), jnp.float32)),
        )
        peak, mass, acc = lax.fori_loop(jnp.int32(0), steps, keep, start)
        at.out_tile[...] = acc / lax.broadcast_in_dim(mass, acc.shape, [0])
        at.lse_tile[...] = peak + jnp.log(mass)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(at.out_tile.at[pl.ds(0, group)], at.out.at[row, item])
        plgpu.copy_smem_to_gmem(at.lse_tile.at[pl.ds(0, loaded)], at.lse.at[row, item])
        plgpu.wait_smem_to_gmem(0)


def _send(source: Any, destination: Any) -> None:
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(source, destination)
    plgpu.wait_smem_to_gmem(0)
