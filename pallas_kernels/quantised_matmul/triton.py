"""Pallas Triton kernel for GPUs: a few rows of activations times a matrix that is quantised in groups.

A program computes a block of outputs from all inputs. Of weights of 4 bits it reads bytes, each of two outputs that
follow each other, and multiplies even and odd outputs apart, so that no number changes its place. A group's sums are
scaled after its product. Blocks are so small that there are programs for every multiprocessor.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels import argument_checks
from pallas_kernels.gpu import chip
from pallas_kernels.gpu.triton_tiles import dot_rows, i32
from pallas_kernels.quantised_matmul import weight_tiles
from pallas_kernels.quantised_matmul.matmul_problem import Problem

#: Rows beyond which XLA's product, of weights that are floats a block at a time, is left to do it.
MOST_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes.

    Attributes:
      lines: outputs of a program, of 4 bits pairs of them; a power of two of at least 16.
      warps: warps of a thread block, a power of two. stages: groups in flight, at least 1.
    """

    lines: int = 32
    warps: int = 4
    stages: int = 3

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for sizes that Triton cannot take."""
        argument_checks.block_size("lines", self.lines, 16)
        argument_checks.block_size("warps", self.warps, 1)
        argument_checks.at_least("stages", self.stages, 1)

    @classmethod
    def default(cls, p: Problem) -> Config:
        """Half as many lines where larger blocks would leave multiprocessors without one; not timed on a device."""
        few = p.values.shape[1] < 32 * chip.target().processors
        return cls(16 if few or p.x.dtype == jnp.float32 else 32)


def quantised_matmul(p: Problem, *, config: Config | None = None, interpret: Any = False) -> Float[Array, "S N"]:
    """See :func:`pallas_kernels.quantised_matmul.quantised_matmul`."""
    if p.fp8:
        raise NotImplementedError("The GPU kernel multiplies whole numbers, not float8 ones.")
    rows = len(p.x)
    if not 1 <= rows <= MOST_ROWS:
        raise NotImplementedError(f"The GPU kernel multiplies 1 to {MOST_ROWS} rows, not {rows}.")
    chip.needs_ampere(chip.target())
    if p.group not in (16, 32, 64, 128):
        raise NotImplementedError(f"The GPU kernel takes groups of 16, 32, 64 or 128 inputs, not {p.group}.")
    c, inputs = config or Config.default(p), p.x.shape[1]
    arrays = [p.x, p.values, p.scale, *([] if p.minimum is None else [p.minimum])]
    return pl.pallas_call(
        functools.partial(_kernel, c=c, bits=p.bits, group=p.group, fp4=p.fp4),
        grid=(pl.cdiv(p.values.shape[1], c.lines),),
        in_specs=[pl.no_block_spec] * len(arrays),
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct((rows, p.outputs), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=c.warps, num_stages=c.stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inputs * p.outputs,
            bytes_accessed=sum(each.nbytes for each in arrays) + 4 * rows * p.outputs,
            transcendentals=0,
        ),
        interpret=interpret,
        name="quantised_matmul_triton",
    )(*arrays)


def _kernel(x, values, scale, *rest, c, bits, group, fp4):
    *minima, out = rest
    (count, _), (_, lines, tile), parts = x.shape, values.shape, 8 // bits
    size = max(16, pl.next_power_of_2(count))
    row, line = (
        jnp.arange(size, dtype=jnp.int32),
        pl.program_id(0) * i32(c.lines) + jnp.arange(c.lines, dtype=jnp.int32),
    )
    there, inside = row < i32(count), line < i32(lines)

    def grid(first: Array, second: Array) -> tuple[Array, Array]:
        shape = first.shape[0], second.shape[0]
        return jnp.broadcast_to(first[:, None], shape), jnp.broadcast_to(second[None, :], shape)

    def body(g: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        begin = g * i32(group) + jnp.arange(group, dtype=jnp.int32)
        at = grid(row, begin)
        own = plt.load(x.at[at], mask=there[:, None] & (at[1] >= i32(0)), other=0.0)
        n, lane = grid(line, jax.lax.rem(begin, i32(tile)))
        first_tile = jnp.broadcast_to(jax.lax.div(g * i32(group), i32(tile)), n.shape)
        held = plt.load(values.at[first_tile, n, lane], mask=inside[:, None] & (lane >= i32(0)), other=0)
        found = []
        for part, total in enumerate(totals):
            whole = held.astype(jnp.int32)
            if bits == 4:
                whole = ((jax.lax.shift_right_logical(whole, i32(4 * part)) & i32(15)) ^ i32(8)) - i32(8)
            whole = weight_tiles.fp4_numbers(whole) if fp4 else whole
            output = line * i32(parts) + i32(part)
            where = jnp.broadcast_to(g, output.shape), output
            step = weight_tiles.floats(plt.load(scale.at[where], mask=inside, other=0))
            total = total + dot_rows(own, whole.astype(own.dtype)) * step[None, :]
            if minima:
                least = weight_tiles.floats(plt.load(minima[0].at[where], mask=inside, other=0))
                least = least + step * jnp.float32(weight_tiles.OFFSET if bits == 4 else 0)
                total = total + own.astype(jnp.float32).sum(axis=1)[:, None] * least[None, :]
            found.append(total)
        return tuple(found)

    zeros = jnp.zeros((size, c.lines), jnp.float32)
    totals = jax.lax.fori_loop(i32(0), i32(scale.shape[0]), body, (zeros,) * parts)
    for part, total in enumerate(totals):
        at = grid(row, line * i32(parts) + i32(part))
        plt.store(out.at[at], total, mask=there[:, None] & inside[None, :])
