"""XLA form: runs everywhere, and is the one for CPUs.

A loop of traced length over blocks of keys: only the scores of one block are in memory, and blocks that no query
attends to are not visited.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_mass.mass_problem import Counting, Masses, Problem
from pallas_kernels.softmax import NEG, NOTHING


def log_sum_exp(p: Problem) -> Float[Array, "B H G N"]:
    """See :func:`pallas_kernels.attention_mass.log_sum_exp`."""
    q, last = _scaled(p), _last(p)
    kept, empty = p.kept, jnp.zeros(q.shape[:3], jnp.float32)

    def fold(carry: tuple[Array, Array], scores: Array) -> tuple[Array, Array]:
        peak, mass = carry
        higher = jnp.maximum(peak, scores.max(axis=-1))
        weight = jnp.where(scores > NEG, jnp.exp(scores - higher[..., None]), 0.0)
        return higher, mass * jnp.exp(peak - higher) + weight.sum(axis=-1)

    carry = (empty + NEG, empty)
    if kept is not None:
        carry = jax.lax.fori_loop(0, kept.blocks, lambda i, c: fold(c, _kept_scores(p, q, i)), carry)
    carry = jax.lax.fori_loop(0, _blocks(p), lambda i, c: fold(c, _new_scores(p, q, last, i)), carry)
    # NEG plus the logarithm of the smallest number is NEG: a query that attends to nothing needs no special case.
    return (carry[0] + jnp.log(jnp.maximum(carry[1], jnp.finfo(jnp.float32).tiny))).reshape(p.q.shape[:4])


def attention_mass(p: Problem, c: Counting) -> Masses:
    """See :func:`pallas_kernels.attention_mass.attention_mass`."""
    kept = None
    if p.kept is not None:
        kept = kept_mass(p, c)
    q, last = _scaled(p), _last(p)

    def over_new(i: Int[Array, ""], mass: Array) -> Array:
        return _add_at(mass, _masses(p, c, _new_scores(p, q, last, i)), i * p.block)

    start = jnp.zeros((*p.q.shape[:3], p.k.shape[2]), jnp.float32) if c.onto is None else c.onto.new
    return Masses(jax.lax.fori_loop(0, _blocks(p), over_new, start), kept)


def kept_mass(p: Problem, c: Counting) -> Float[Array, "B H G C"]:
    """Masses of the kept rows alone."""
    kept, q = p.kept, _scaled(p)
    assert kept is not None
    start = None if c.onto is None else c.onto.kept
    if start is None:
        start = jnp.zeros((*p.q.shape[:3], kept.k.shape[2]), jnp.float32)

    def over_kept(i: Int[Array, ""], mass: Array) -> Array:
        return _add_at(mass, _masses(p, c, _kept_scores(p, q, i)), i * kept.block)

    return jax.lax.fori_loop(0, kept.blocks, over_kept, start)


def kept_log_sum_exp(p: Problem) -> Float[Array, "B H G N"]:
    """Log-sum-exp over the kept rows alone."""
    nothing = jnp.full_like(p.offset, -p.q.shape[3])
    return log_sum_exp(Problem(p.q, p.k, nothing, p.scale, p.kept, p.bias, p.block))


def _scaled(p: Problem) -> Float[Array, "B H M D"]:
    """Queries times their scale in float32, group-major."""
    batch, heads, _, _, dim = p.q.shape
    return p.q.reshape(batch, heads, -1, dim).astype(jnp.float32) * p.scale[:, None, None, None]


def _last(p: Problem) -> Int[Array, "B M"]:
    """The last key each query attends to."""
    _, _, group, count, _ = p.q.shape
    return jnp.tile(p.offset[:, None] + jnp.arange(count), (1, group))


def _blocks(p: Problem) -> Int[Array, ""]:
    """Blocks of keys that some query attends to."""
    return jnp.clip((jnp.max(p.offset) + p.q.shape[3] + p.block - 1) // p.block, 0, p.k.shape[2] // p.block)


def _masses(p: Problem, c: Counting, scores: Float[Array, "B H M S"]) -> Float[Array, "B H G S"]:
    """Masses that a block of keys gets from all queries."""
    batch, heads, group, count, _ = p.q.shape
    # A query that attends to nothing has a normaliser of NEG, and exp(NEG - NEG) would count as 1.
    normaliser = jnp.where(c.lse > NOTHING, c.lse, 0.0).reshape(batch, heads, -1, 1)
    # A normaliser is at least as large as any of its scores, up to rounding.
    shifted = jnp.minimum(scores - normaliser, 0.0)
    if c.weight is not None:
        log_weight = jnp.where(c.weight > 0, jnp.log(jnp.maximum(c.weight, jnp.finfo(jnp.float32).tiny)), NEG)
        shifted = shifted + jnp.tile(log_weight, (1, group))[:, None, :, None]
    return jnp.exp(shifted).reshape(batch, heads, group, count, -1).sum(axis=3)


def _new_scores(p: Problem, q: Array, last: Array, i: Int[Array, ""]) -> Float[Array, "B H M S"]:
    """Scores of one block of keys, NEG where masked."""
    kb = jax.lax.dynamic_slice_in_dim(p.k, i * p.block, p.block, axis=2)
    scores = jnp.einsum("bhnd,bhsd->bhns", q, kb, preferred_element_type=jnp.float32)
    place = i * p.block + jnp.arange(p.block)
    if p.bias is not None:
        scores = scores + p.bias(place[None, None])
    return jnp.where((place <= last[..., None])[:, None], scores, NEG)


def _kept_scores(p: Problem, q: Array, i: Int[Array, ""]) -> Float[Array, "B H M S"]:
    """Scores of one block of kept rows, NEG where they are not valid."""
    assert p.kept is not None
    kb, _, visible, bias = p.kept.block_of(i, p.bias)
    scores = jnp.einsum("bhnd,bhsd->bhns", q, kb, preferred_element_type=jnp.float32)
    if bias is not None:
        scores = scores + bias
    return jnp.where(visible, scores, NEG)


def _add_at(total: Array, part: Array, start: Array) -> Array:
    """``total`` with ``part`` added from ``start`` on, along the last axis."""
    here = jax.lax.dynamic_slice_in_dim(total, start, part.shape[-1], axis=total.ndim - 1)
    return jax.lax.dynamic_update_slice_in_dim(total, here + part, start, axis=total.ndim - 1)
