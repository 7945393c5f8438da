"""CPU form: integers times integers, in one batched product over the tiles of inputs.

Activations are rounded to int8 in the groups of the weights, each with a scale of its own, so that both scales multiply
the groups' sums, which are exact in int32. A tile with several groups is multiplied by as many copies of the rows, each
zero but in one group. Many rows are multiplied as floats, a block of outputs at a time, with the same roundings: so a
row's result is the same, but for the order of sums, whatever other rows are beside it.

Measured on 2 cores with AVX-512 VNNI, 2 rows, [1536] x [4096, 1536], in ms: float32 1.2, int8 with a scale an output
0.6, this 1.7 (groups of 128). Half of it is unpacking, which XLA does not fuse into products. Where the tiles were not
the leading axis, XLA transposed all weights first, 20 ms; multiply-and-sum outside of products took 10 to 300.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised_matmul import weight_tiles, xla
from pallas_kernels.quantised_matmul.matmul_problem import Problem

#: Rows, counted with copies for groups, beyond which the partial sums take more than floats would.
MOST_ROWS = 64


def quantised_matmul(p: Problem, *, config: None = None) -> Float[Array, "S N"]:
    """See :func:`pallas_kernels.quantised_matmul.quantised_matmul`; there is nothing to configure."""
    if p.fp8:
        raise NotImplementedError("The CPU form multiplies whole numbers, not float8 ones.")
    del config
    whole, step = rounded(p)
    if len(p.x) * p.tile // p.group > MOST_ROWS:
        return xla.products(p, (whole * step[..., None]).reshape(p.x.shape))
    found = _scaled(p, _partial(p, whole), step)
    if p.minimum is None:
        return found
    minima = weight_tiles.minima(p.values, p.scale, p.minimum)
    assert minima is not None
    # Sums of the rounded activations: what rounding adds then is multiplied by weights, not by places above a minimum.
    sums = whole.sum(axis=-1, dtype=jnp.int32).astype(jnp.float32) * step
    return found + jnp.matmul(sums, minima, precision=jax.lax.Precision.HIGHEST)


def rounded(p: Problem) -> tuple[Int[Array, "S G L"], Float[Array, "S G"]]:
    """int8 activations by group, and their scales, as weights of int8 are rounded."""
    grouped = p.x.astype(jnp.float32).reshape(len(p.x), p.scale.shape[0], p.group)
    step = jnp.abs(grouped).max(axis=-1, initial=0) * jnp.float32(1 / 127)
    step = jnp.where(step == 0, 1, step)
    return jnp.rint(grouped / step[..., None]).astype(jnp.int8), step


def _partial(p: Problem, whole: Int[Array, "S G L"]) -> Int[Array, "G S N"]:
    """The sums of each group, int32; of 4 bits those of even outputs before those of odd ones."""
    rows, tiles, each = len(whole), p.values.shape[0], p.tile // p.group
    spread = whole.reshape(rows, tiles, each, p.group).transpose(1, 2, 0, 3)
    if each > 1:
        own = jnp.eye(each, dtype=jnp.int8)[:, None, :, None]
        spread = spread[:, :, :, None] * own
    spread = spread.reshape(tiles, each * rows, p.tile)
    if each * rows == 1:  # a product of one row is scalar code
        spread = jnp.pad(spread, ((0, 0), (0, 1), (0, 0)))
    values = p.values
    if p.bits == 4:
        halves = [(half ^ 8).astype(jnp.int8) - 8 for half in (values & 15, values >> 4)]
        values = jnp.concatenate(halves, axis=1)
        values = weight_tiles.fp4_numbers(values) if p.fp4 else values
    axes = (((2,), (2,)), ((0,), (0,)))
    sums = jax.lax.dot_general(spread, values, axes, preferred_element_type=jnp.int32)
    return sums[:, : each * rows].reshape(tiles * each, rows, p.outputs)


def _scaled(p: Problem, sums: Int[Array, "G S N"], step: Float[Array, "S G"]) -> Float[Array, "S N"]:
    """The groups' sums times both scales, summed."""

    def part(sums: Array, scale: Array) -> Array:
        return (sums.astype(jnp.float32) * weight_tiles.floats(scale)[:, None] * step.T[..., None]).sum(axis=0)

    if p.bits == 8:
        return part(sums, p.scale)
    halves = [part(half, p.scale[:, i::2]) for i, half in enumerate(jnp.split(sums, 2, axis=-1))]
    return jnp.stack(halves, axis=-1).reshape(len(p.x), p.outputs)
