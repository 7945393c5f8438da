"""XLA form: runs everywhere, with ALiBi too, and on CPUs without a compiler.

A loop of traced length over blocks of keys: only the scores of one block are in memory, and blocks that no query
attends to are not visited.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_mass.mass_problem import Counting, Masses, Problem
from pallas_kernels.softmax import NEG, NOTHING, capped
from pallas_kernels.windows import in_window, key_blocks, reach_of


def log_sum_exp(p: Problem) -> Float[Array, "B H G N"]:
    """See :func:`pallas_kernels.attention_mass.log_sum_exp`."""
    q, last = _scaled(p), _last(p)
    carry = _fold_kept(p, q)
    return _log_of(p, jax.lax.fori_loop(*_blocks(p), lambda i, c: _fold(c, _new_scores(p, q, last, i)), carry))


def kept_log_sum_exp(p: Problem) -> Float[Array, "B H G N"]:
    """Log-sum-exp over the kept tokens alone."""
    return _log_of(p, _fold_kept(p, _scaled(p)))


def _fold(carry: tuple[Array, Array], scores: Array) -> tuple[Array, Array]:
    """A running softmax's largest score and mass after some more scores."""
    peak, mass = carry
    higher = jnp.maximum(peak, scores.max(axis=-1))
    weight = jnp.where(scores > NEG, jnp.exp(scores - higher[..., None]), 0.0)
    return higher, mass * jnp.exp(peak - higher) + weight.sum(axis=-1)


def _fold_kept(p: Problem, q: Float[Array, "B H M D"]) -> tuple[Array, Array]:
    """The running softmax over the kept tokens, if there are any."""
    empty = jnp.zeros(q.shape[:3], jnp.float32)
    carry = (empty + NEG, empty)
    if p.kept is None:
        return carry
    first, blocks = p.kept.first_block(_reach(p)), p.kept.blocks
    return jax.lax.fori_loop(first, blocks, lambda i, c: _fold(c, _kept_scores(p, q, i)), carry)


def _log_of(p: Problem, carry: tuple[Array, Array]) -> Float[Array, "B H G N"]:
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
    return Masses(jax.lax.fori_loop(*_blocks(p), over_new, start), kept)


def kept_mass(p: Problem, c: Counting) -> Float[Array, "B H G C"]:
    """Masses of the kept tokens alone."""
    kept, q = p.kept, _scaled(p)
    assert kept is not None
    start = None if c.onto is None else c.onto.kept
    if start is None:
        start = jnp.zeros((*p.q.shape[:3], kept.k.shape[2]), jnp.float32)

    def over_kept(i: Int[Array, ""], mass: Array) -> Array:
        return _add_at(mass, _masses(p, c, _kept_scores(p, q, i)), i * kept.block)

    return jax.lax.fori_loop(kept.first_block(_reach(p)), kept.blocks, over_kept, start)


def _scaled(p: Problem) -> Float[Array, "B H M D"]:
    """Queries times their scale in float32, group-major."""
    batch, heads, _, _, dim = p.q.shape
    return p.q.reshape(batch, heads, -1, dim).astype(jnp.float32) * p.scale[:, None, None, None]


def _last(p: Problem) -> Int[Array, "B M"]:
    """The last key each query attends to."""
    _, _, group, count, _ = p.q.shape
    return jnp.tile(p.offset[:, None] + jnp.arange(count), (1, group))


def _reach(p: Problem) -> Int[Array, "#B M"] | None:
    """The number of kept tokens that each query attends to; None for all."""
    return reach_of(p.window, _last(p))


def _blocks(p: Problem) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """The first block of keys that some query attends to, and the first beyond them."""
    first, blocks = key_blocks(p.offset, p.q.shape[3], p.block, p.window)
    return first, jnp.clip(blocks, 0, p.k.shape[2] // p.block)


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
    scores = capped(jnp.einsum("bhnd,bhsd->bhns", q, kb, preferred_element_type=jnp.float32), p.soft_cap)
    place = i * p.block + jnp.arange(p.block)
    if p.bias is not None:
        scores = scores + p.bias(place[None, None])
    return jnp.where(in_window(last[..., None], place, p.window)[:, None], scores, NEG)


def _kept_scores(p: Problem, q: Array, i: Int[Array, ""]) -> Float[Array, "B H M S"]:
    """Scores of one block of kept tokens, NEG where they are not valid."""
    assert p.kept is not None
    kb, _, visible, bias = p.kept.block_of(i, p.bias, _reach(p))
    scores = capped(jnp.einsum("bhnd,bhsd->bhns", q, kb, preferred_element_type=jnp.float32), p.soft_cap)
    if bias is not None:
        scores = scores + bias
    return jnp.where(visible, scores, NEG)


def _add_at(total: Array, part: Array, start: Array) -> Array:
    """``total`` with ``part`` added from ``start`` on, along the last axis."""
    here = jax.lax.dynamic_slice_in_dim(total, start, part.shape[-1], axis=total.ndim - 1)
    return jax.lax.dynamic_update_slice_in_dim(total, here + part, start, axis=total.ndim - 1)
