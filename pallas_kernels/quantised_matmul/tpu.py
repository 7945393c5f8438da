"""Pallas TPU kernel: a few rows of activations times a matrix that is quantised in groups, read once from memory.

A program has all inputs of a block of outputs. It looks at a tile's bytes as numbers of 4 bits, which are the same
registers in another type, converts them to bfloat16, which holds them exactly, and multiplies; each group's sums are
scaled afterwards, which costs a multiplication for every number of the result where scaling weights would for every
weight. Where a tile has several groups, its product has a copy of the rows for each of them, zero in the others, and
float32 activations are three rows of bfloat16 that sum to them: weights are what a matrix unit waits for, and rows up
to its size are free. The sums of activations, which minima are multiplied by, are a product with ones.

Scales of float16, of which chips have none, are given by their bits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import argument_checks, dispatch
from pallas_kernels.quantised_matmul import weight_tiles
from pallas_kernels.quantised_matmul.matmul_problem import Problem
from pallas_kernels.tpu.tiles import LANES

#: Rows, counted with their copies, beyond which XLA's product, of weights that are floats a block at a time, does it.
MOST_ROWS = 256
#: Bytes of a program's weights, at most.
_BLOCK_BYTES = 4 << 20
#: Numbers that registers hold of a program's sums, an eighth of them, and of one product.
_SUMS, _RESULTS = 1 << 13, 1 << 14
#: Tiles whose products follow each other without a branch.
UNROLLED = 16
#: Groups whose scales are converted at a time: rows of a register of 16 bits.
_CONVERTED = 16


@dataclasses.dataclass(frozen=True)
class Config:
    """Block size.

    Attributes:
      outputs: of a program; a multiple of 128 that divides N.
    """

    outputs: int

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for sizes that are no whole lanes."""
        argument_checks.at_least("outputs", self.outputs, LANES)
        if self.outputs % LANES:
            raise ValueError(f"outputs is {self.outputs}; give a multiple of {LANES}.")

    @classmethod
    def default(cls, p: Problem) -> Config:
        """The most outputs whose weights fit a block and whose results fit registers; not timed on a device."""
        rows, inputs = max(8, p.x.shape[0]), p.x.shape[1]
        most = min(_SUMS // rows, _RESULTS // (rows * _copies(p)))
        if (p.bits == 8 and p.minimum is not None) or p.fp4:
            most //= 2  # what is multiplied by minima takes registers too; 4 bits leave enough of them, if whole
        fitting = [
            size
            for size in (1024, 512, 256, LANES)
            if p.outputs % size == 0 and size <= most and inputs * size * p.bits // 8 <= _BLOCK_BYTES
        ]
        return cls(fitting[0] if fitting else LANES)


def quantised_matmul(p: Problem, *, config: Config | None = None, interpret: Any = False) -> Float[Array, "S N"]:
    """See :func:`pallas_kernels.quantised_matmul.quantised_matmul`."""
    if p.fp8:
        raise NotImplementedError("The TPU kernel multiplies whole numbers, not float8 ones.")
    rows, most = len(p.x), MOST_ROWS // _copies(p)
    if not 1 <= rows <= most:
        raise NotImplementedError(f"The TPU kernel multiplies 1 to {most} rows like these, not {rows}.")
    if p.tile != LANES or p.outputs % LANES:
        raise NotImplementedError(f"The TPU kernel takes multiples of {LANES} inputs and outputs.")
    if p.x.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"The TPU kernel takes float32 or bfloat16 activations, not {p.x.dtype}.")
    if p.scale.dtype == jnp.float16:
        raise NotImplementedError("The TPU kernel takes scales of float16 by their bits, as int16.")
    config = config or Config.default(p)
    if p.outputs % config.outputs:
        raise ValueError(f"Blocks of {config.outputs} outputs do not divide {p.outputs}.")
    return _call(p, config, -rows % 8, interpret)[:rows]


def _copies(p: Problem) -> int:
    """Rows of a product for a row of activations: one a group of a tile, and of float32 three."""
    return p.tile // p.group * (3 if p.x.dtype == jnp.float32 else 1)


def _arithmetic() -> DTypeLike:
    """The dtype of arithmetic on numbers of bfloat16: before v6e vector units convert to float32 for each operation."""
    return jnp.bfloat16 if any(name in dispatch.device_kind().lower() for name in ("v6", "tpu7")) else jnp.float32


def _call(p: Problem, c: Config, padding: int, interpret: Any) -> Float[Array, "S N"]:
    x = jnp.pad(p.x, ((0, padding), (0, 0)))
    rows, inputs = x.shape
    tiles, groups = p.values.shape[0], p.scale.shape[0]
    by_group = pl.BlockSpec((groups, c.outputs), lambda i: (jnp.int32(0), i))
    whole = functools.partial(pl.BlockSpec, index_map=lambda i: (jnp.int32(0), jnp.int32(0)))
    minima = [] if p.minimum is None else [(p.minimum, by_group)]
    lines = c.outputs * p.bits // 8
    values = pl.BlockSpec((tiles, lines, LANES), lambda i: (jnp.int32(0), i, jnp.int32(0)))
    given = [(x, whole((rows, inputs))), (p.values, values), (p.scale, by_group), *minima]
    return pl.pallas_call(
        functools.partial(_kernel, bits=p.bits, group=p.group, fp4=_arithmetic() if p.fp4 else None),
        grid=(p.outputs // c.outputs,),
        in_specs=[spec for _, spec in given],
        out_specs=pl.BlockSpec((rows, c.outputs), lambda i: (jnp.int32(0), i)),
        out_shape=jax.ShapeDtypeStruct((rows, p.outputs), jnp.float32),
        scratch_shapes=[pltpu.VMEM((groups, c.outputs), jnp.float32)] * (1 + len(minima)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inputs * p.outputs,
            bytes_accessed=sum(each.nbytes for each, _ in given) + 4 * rows * p.outputs,
            transcendentals=0,
        ),
        interpret=interpret,
        name="quantised_matmul",
    )(*(each for each, _ in given))


def floats_of(bits: Array) -> Float[Array, "*S"]:
    """float32 numbers of the bits of finite float16 ones."""
    wide = bits.astype(jnp.int32)
    mantissa, exponent = wide & jnp.int32(0x3FF), (wide >> 10) & jnp.int32(31)
    normal = jax.lax.bitcast_convert_type((exponent + jnp.int32(112) << 23) | (mantissa << 13), jnp.float32)
    small = mantissa.astype(jnp.float32) * jnp.float32(2**-24)
    found = jnp.where(exponent == 0, small, normal)
    return jnp.where(wide < 0, -found, found)


def _converted(held: Any, first: int, last: int) -> Float[Array, "G N"]:
    """Some groups' scales in float32."""
    some = held[first:last]
    return floats_of(some) if some.dtype == jnp.int16 else some.astype(jnp.float32)


def _parts(x: Array) -> list[Array]:
    """bfloat16 numbers that sum to activations."""
    if x.dtype == jnp.bfloat16:
        return [x]
    found = []
    for _ in range(3):
        found.append(x.astype(jnp.bfloat16))
        x = x - found[-1].astype(jnp.float32)
    return found


def _kernel(x, values, scale, *rest, bits, group, fp4):
    given = len(rest) // 2 - 1
    minima, out, (scales, *least) = rest[:given], rest[given], rest[given + 1 :]
    groups = scale.shape[0]
    parts_of_groups = [(first, min(first + _CONVERTED, groups)) for first in range(0, groups, _CONVERTED)]
    for first, last in parts_of_groups:
        scales[first:last] = _converted(scale, first, last)
    for first, last in parts_of_groups if minima else ():
        offset = jnp.float32(weight_tiles.OFFSET if bits == 4 else 0)
        least[0][first:last] = _converted(minima[0], first, last) + offset * scales[first:last]
    rows, outputs = out.shape
    each, tiles = LANES // group, values.shape[0]
    lane = jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1), jnp.int32(group))
    ones = jnp.ones((LANES, LANES), jnp.bfloat16)

    def product(own: Array, weight: Array) -> Float[Array, "R N"]:
        axes = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(own, weight, axes, preferred_element_type=jnp.float32)

    def tile(t: Any, total: Array) -> Array:
        held = values[t]
        weight = pltpu.bitcast(held, jnp.int4) if bits == 4 else held
        weight = weight if fp4 is None else weight_tiles.fp4_numbers(weight.astype(fp4))
        weight = weight.astype(jnp.bfloat16)
        parts = _parts(x[:, pl.ds(pl.multiple_of(t * LANES, LANES), LANES)])
        if each > 1:
            parts = [jnp.where(lane == jnp.int32(r), part, jnp.zeros_like(part)) for r in range(each) for part in parts]
        copies, own = len(parts) // each, jnp.concatenate(parts) if len(parts) > 1 else parts[0]
        sums, plain = product(own, weight), product(own, ones) if minima else None
        for r in range(each):
            at = pl.ds(t * each + r, 1)
            for start in range(r * copies * rows, (r + 1) * copies * rows, rows):
                total = total + sums[start : start + rows] * scales[at, :]
                if plain is not None:
                    wide = jnp.concatenate([plain[start : start + rows]] * (outputs // LANES), axis=1)
                    total = total + wide * least[0][at, :]
        return total

    def several(i: Any, total: Array) -> Array:
        for j in range(UNROLLED):
            total = tile(i * jnp.int32(UNROLLED) + jnp.int32(j), total)
        return total

    total = jnp.zeros((rows, outputs), jnp.float32)
    total = jax.lax.fori_loop(jnp.int32(0), jnp.int32(tiles // UNROLLED), several, total)
    for t in range(tiles - tiles % UNROLLED, tiles):
        total = tile(jnp.int32(t), total)
    out[...] = total
