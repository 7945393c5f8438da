"""XLA form: runs everywhere, and is the one for CPUs.

A running softmax over blocks of keys, in loops of traced length: only the scores of one block are in memory, and only
blocks on and below the diagonal are read. Softmax and sums are float32 for any dtype of keys and values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.prefill.prefill_problem import Prefilled, Problem
from pallas_kernels.rows import Bias, Rows
from pallas_kernels.softmax import NEG, log_of, merge

# A running softmax: (peak, mass, unnormalised output) of shapes [B, H, N], [B, H, N], [B, H, N, D].
Running = tuple[Float[Array, "B H N"], Float[Array, "B H N"], Float[Array, "B H N D"]]


def prefill(p: Problem, *, config: None = None) -> Prefilled:
    """See :func:`pallas_kernels.prefill.prefill`; there is nothing to configure, and ``length`` is not used."""
    del config
    batch, heads, group, count, dim = p.q.shape
    q = p.q.reshape(batch, heads, group * count, dim)
    running = running_start(batch, heads, group * count, dim)
    if p.kept is not None:
        running = attend_rows(running, q, p.kept, scale=p.scale, bias=p.bias)
    peak, mass, out = _attend_causal(running, q, p)
    out = (out / _some(mass)[..., None]).astype(p.q.dtype)
    return Prefilled(out.reshape(p.q.shape), log_of(peak, mass).reshape(p.q.shape[:4]))


def with_kept_rows(p: Problem, out: Array, lse: Array) -> Prefilled:
    """A kernel's attention over the prompt's keys, merged with attention over the kept rows, if there are any."""
    if p.kept is not None:
        out, lse = merge(out, lse, *rows_alone(p))
    return Prefilled(out.astype(p.q.dtype), lse)


def rows_alone(p: Problem) -> tuple[Float[Array, "B H G N D"], Float[Array, "B H G N"]]:
    """Attention over the kept rows alone, in float32: output and log-sum-exp, NEG where no row is valid."""
    assert p.kept is not None
    batch, heads, group, count, dim = p.q.shape
    out, lse = attend_alone(p.q.reshape(batch, heads, group * count, dim), p.kept, scale=p.scale, bias=p.bias)
    return out.reshape(p.q.shape), lse.reshape(p.q.shape[:4])


def attend_alone(
    q: Float[Array, "B H N D"], kept: Rows, *, scale: float, bias: Bias | None
) -> tuple[Float[Array, "B H N D"], Float[Array, "B H N"]]:
    """:func:`rows_alone` of group-major queries."""
    peak, mass, out = attend_rows(running_start(*q.shape), q, kept, scale=scale, bias=bias)
    return out / _some(mass)[..., None], log_of(peak, mass)


def _some(mass: Float[Array, "B H N"]) -> Float[Array, "B H N"]:
    """The mass as a divisor: 0 / 0 becomes 0 for a query that attends to no key."""
    return jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)


def running_start(batch: int, heads: int, count: int, dim: int) -> Running:
    """A running softmax over no keys."""
    empty = jnp.zeros((batch, heads, count), jnp.float32)
    return empty + NEG, empty, jnp.zeros((batch, heads, count, dim), jnp.float32)


def attend_block(
    running: Running,
    q: Float[Array, "B H N D"],
    k: Float[Array, "B H S D"],
    v: Float[Array, "B H S D"],
    visible: Bool[Array, "#B #H #N S"] | Bool[Array, "N S"],
    *,
    scale: float,
    bias: Float[Array, "#B #H #N S"] | None = None,
) -> Running:
    """Fold one block of keys and values into a running softmax; ``bias`` is added to the scaled scores."""
    peak, mass, out = running
    scores = jnp.einsum("bhnd,bhsd->bhns", q, k, preferred_element_type=jnp.float32) * scale
    if bias is not None:
        scores = scores + bias
    scores = jnp.where(visible, scores, NEG)
    new_peak = jnp.maximum(peak, scores.max(axis=-1))
    # Masked weights are set to 0: a query that attended to nothing yet has peak NEG, and exp(NEG - NEG) = 1.
    weight = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0.0)
    shrink = jnp.exp(peak - new_peak)
    gained = jnp.einsum("bhns,bhsd->bhnd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return new_peak, mass * shrink + weight.sum(axis=-1), out * shrink[..., None] + gained


def attend_rows(
    running: Running, q: Float[Array, "B H N D"], kept: Rows, *, scale: float, bias: Bias | None = None
) -> Running:
    """Fold kept rows into a running softmax, block by block; every query attends to all valid ones."""

    def body(i: Int[Array, ""], carry: Running) -> Running:
        k, v, visible, added = kept.block_of(i, bias)
        return attend_block(carry, q, k, v, visible, scale=scale, bias=added)

    return jax.lax.fori_loop(0, kept.blocks, body, running)


def _attend_causal(running: Running, q: Float[Array, "B H N D"], p: Problem) -> Running:
    """Fold the keys up to each query's own into a running softmax."""
    _, _, group, count, _ = p.q.shape
    place = jnp.tile(jnp.arange(count), group)[:, None]
    last = place + (p.offset if p.offset.ndim == 0 else p.offset[:, None, None, None])

    def body(j: Int[Array, ""], carry: Running) -> Running:
        kb = jax.lax.dynamic_slice_in_dim(p.k, j * p.block, p.block, axis=2)
        vb = jax.lax.dynamic_slice_in_dim(p.v, j * p.block, p.block, axis=2)
        key = j * p.block + jnp.arange(p.block)
        bias = None if p.bias is None else p.bias(key[None, None])
        return attend_block(carry, q, kb, vb, last >= key, scale=p.scale, bias=bias)

    blocks = (jnp.max(p.offset) + count + p.block - 1) // p.block
    return jax.lax.fori_loop(0, jnp.minimum(blocks, p.k.shape[2] // p.block), body, running)
