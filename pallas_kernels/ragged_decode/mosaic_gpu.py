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
from pallas_kernels.softmax import NEG, capped

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
        page_bytes = ROWS * p.pages.slot_nbytes
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
    static = _Static(
        rows=cut.rows,
        row_pages=total,
        stages=config.stages,
        scale=p.scale,
        logits_scale=p.scale if p.logits_scale is None else p.logits_scale,
        soft_cap=p.soft_cap,
        window=p.window,
        arithmetic=_Interpreted if interpret else _Compiled,
    )
    kernel = functools.partial(_kernel, names=(*given, *made), static=static)
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


@dataclasses.dataclass(frozen=True)
class _Static:
    """Static parameters: slots of an item, pages of a batch row and in flight, the scores' options."""

    rows: int
    row_pages: int
    stages: int
    scale: float
    logits_scale: float
    soft_cap: float | None
    window: int | None
    arithmetic: type[_Compiled] | type[_Interpreted]


def _kernel(*refs: Any, names: tuple[str, ...], static: _Static, **scratch: Any) -> None:
    """Attention over one item's visible slots: ``out``, ``lse``, and the scores if there is a ``logits``."""
    at = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch)
    (at.k_tile, at.v_tile), at.out_tile = at.tiles
    item = _Item.of(at, static)
    pl.when(item.high <= item.low)(item.store_nothing)
    pl.when(item.high > item.low)(item.attend)


@dataclasses.dataclass(frozen=True)
class _Item:
    """The item that a thread block reads: its place and visible slots. Built by :meth:`of`.

    Attributes:
      at: references by name; which there are says what is asked of the kernel. static: see there.
      row, item: place in the grid. head: the item's. first_slot: of the item in its head.
      low, high: first and end of its visible slots. first: first page with one, of the item's.
      steps: pages to read, from ``first_page`` of the pool on.
    """

    at: Any
    static: _Static
    row: Array
    item: Array
    head: Array
    first_slot: Array
    low: Array
    high: Array
    first: Array
    steps: Array
    first_page: Array

    @classmethod
    def of(cls, at: Any, static: _Static) -> _Item:
        """Find the item of this thread block."""
        item, row = lax.axis_index("item"), lax.axis_index("row")
        head, page, first_slot = split.at_item(at.table, row, item)
        low, high = split.visible(at.length[row, head], first_slot, static.rows, static.window)
        first = lax.div(low, jnp.int32(ROWS))
        return cls(
            at=at,
            static=static,
            row=row,
            item=item,
            head=head,
            first_slot=first_slot,
            low=low,
            high=high,
            first=first,
            steps=lax.div(high + jnp.int32(ROWS - 1), jnp.int32(ROWS)) - first,
            first_page=row * jnp.int32(static.row_pages) + page + first,
        )

    def store_nothing(self) -> None:
        """Write the log-sum-exp of an item without a visible slot."""
        at, loaded = self.at, self.at.q.shape[2]
        at.lse_tile[...] = self.static.arithmetic.spread(jnp.full((ROWS,), NEG, jnp.float32), 1)
        _send(at.lse_tile.at[pl.ds(0, loaded)], at.lse.at[self.row, self.item])

    def attend(self) -> None:
        """Read the pages and write the result and its log-sum-exp."""
        at, spread = self.at, self.static.arithmetic.spread
        (group, lanes), loaded = at.out.shape[2:], at.q.shape[2]
        plgpu.copy_gmem_to_smem(at.q.at[self.row, self.head], at.q_tile.at[pl.ds(0, loaded)], at.q_here)
        for step in range(self.static.stages):

            @pl.when(self.steps > step)
            def _fetch(step: int = step) -> None:
                self._fetch_keys(step, step)
                self._fetch_values(step, step)

        plgpu.barrier_wait(at.q_here)
        start = (
            spread(jnp.full((ROWS,), NEG, jnp.float32), 1),
            spread(jnp.zeros((ROWS,), jnp.float32), 1),
            spread(jnp.zeros((ROWS, lanes), jnp.float32)),
        )
        peak, mass, acc = lax.fori_loop(jnp.int32(0), self.steps, self._keep, start)
        at.out_tile[...] = acc / lax.broadcast_in_dim(mass, acc.shape, [0])
        at.lse_tile[...] = peak + jnp.log(mass)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(at.out_tile.at[pl.ds(0, group)], at.out.at[self.row, self.item])
        plgpu.copy_smem_to_gmem(at.lse_tile.at[pl.ds(0, loaded)], at.lse.at[self.row, self.item])
        plgpu.wait_smem_to_gmem(0)

    def _fetch_keys(self, step: Array | int, slot: Array | int) -> None:
        at = self.at
        plgpu.copy_gmem_to_smem(at.kv.at[self.first_page + step, 0], at.k_tile.at[slot], at.k_here.at[slot])

    def _fetch_values(self, step: Array | int, slot: Array | int) -> None:
        at = self.at
        plgpu.copy_gmem_to_smem(at.kv.at[self.first_page + step, 1], at.v_tile.at[slot], at.v_here.at[slot])

    def _keep(self, step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Add a page to the running softmax: its peak, mass and sum of values; fetch the one that takes its place."""
        peak, mass, acc = carry
        at, arithmetic = self.at, self.static.arithmetic
        stages = jnp.int32(self.static.stages)
        slot, more = lax.rem(step, stages), step + stages < self.steps
        plgpu.barrier_wait(at.k_here.at[slot])
        raw = arithmetic.scores(at.q_tile, at.k_tile.at[slot])
        pl.when(more)(lambda: self._fetch_keys(step + stages, slot))
        column = arithmetic.columns() + (self.first + step) * jnp.int32(ROWS)
        s = self._scores(raw, self.static.scale, column)
        if hasattr(at, "logits"):
            same = self.static.logits_scale == self.static.scale
            logits = s if same else self._scores(raw, self.static.logits_scale, column)
            self._store_logits(logits, self.first_page + step)
        s = jnp.where(column < self.high, s, jnp.float32(NEG))
        if self.static.window is not None:
            s = jnp.where(column >= self.low, s, jnp.float32(NEG))
        new_peak = jnp.maximum(peak, s.max(axis=1))
        weight = jnp.exp(s - lax.broadcast_in_dim(new_peak, s.shape, [0]))
        fade = jnp.exp(peak - new_peak)
        mass = mass * fade + weight.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
        plgpu.barrier_wait(at.v_here.at[slot])
        acc = arithmetic.added(acc, weight.astype(at.kv.dtype), at.v_tile.at[slot])
        pl.when(more)(lambda: self._fetch_values(step + stages, slot))
        return new_peak, mass, acc

    def _scores(self, raw: Array, scale: float, column: Array) -> Array:
        """Scaled and capped scores, with the bias of the first slot's mass."""
        s = capped(raw * jnp.float32(scale), self.static.soft_cap)
        if hasattr(self.at, "log_mass"):
            s = jnp.where(column + self.first_slot == 0, s + self.at.log_mass[self.row, self.head], s)
        return s

    def _store_logits(self, logits: Array, page: Array) -> None:
        """Write a page's scores, once those of the page before have left the tile."""
        at = self.at
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        at.logits_tile[...] = logits
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(at.logits_tile.at[pl.ds(0, at.out.shape[2])], at.logits.at[page])


def _send(source: Any, destination: Any) -> None:
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(source, destination)
    plgpu.wait_smem_to_gmem(0)
