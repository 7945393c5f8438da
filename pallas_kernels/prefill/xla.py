"""XLA form: runs everywhere, with ALiBi too, and on CPUs without a compiler.

A running softmax over blocks of keys, in loops of traced length: only the scores of one block are in memory, and only
blocks on and below the diagonal are read. Softmax and sums are float32 for any dtype of keys and values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.kept_tokens import Bias, KeptTokens
from pallas_kernels.prefill.prefill_problem import Prefilled, Problem
from pallas_kernels.softmax import NEG, capped, log_of, merge
from pallas_kernels.windows import in_window, key_blocks, reach_of

# A running softmax: (peak, mass, unnormalised output) of shapes [B, H, N], [B, H, N], [B, H, N, D].
Running = tuple[Float[Array, "B H N"], Float[Array, "B H N"], Float[Array, "B H N D"]]


def prefill(p: Problem, *, config: None = None) -> Prefilled:
    """See :func:`pallas_kernels.prefill.prefill`; there is nothing to configure, and ``length`` is not used."""
    del config
    batch, heads, group, count, dim = p.q.shape
    q = p.q.reshape(batch, heads, group * count, dim)
    running = running_start(batch, heads, group * count, dim)
    if p.kept is not None:
        running = attend_rows(running, q, p.kept, bias=p.bias, reach=_reach(p), **_scores(p))
    peak, mass, out = _attend_causal(running, q, p)
    out = (out / _some(mass)[..., None]).astype(p.q.dtype)
    return Prefilled(out.reshape(p.q.shape), log_of(peak, mass).reshape(p.q.shape[:4]))


def with_kept_rows(p: Problem, out: Array, lse: Array) -> Prefilled:
    """A kernel's attention over the prompt's keys, merged with attention over the kept tokens, if there are any."""
    if p.kept is not None:
        out, lse = merge(out, lse, *rows_alone(p))
    return Prefilled(out.astype(p.q.dtype), lse)


def rows_alone(p: Problem) -> tuple[Float[Array, "B H G N D"], Float[Array, "B H G N"]]:
    """Attention over the kept tokens alone, in float32: output and log-sum-exp, NEG where there is none."""
    assert p.kept is not None
    batch, heads, group, count, dim = p.q.shape
    q = p.q.reshape(batch, heads, group * count, dim)
    out, lse = attend_alone(q, p.kept, bias=p.bias, reach=_reach(p), **_scores(p))
    return out.reshape(p.q.shape), lse.reshape(p.q.shape[:4])


def _scores(p: Problem) -> dict[str, Any]:
    """The options that turn products of queries and keys into scores."""
    return {"scale": p.scale, "soft_cap": p.soft_cap}


def _places(p: Problem) -> Int[Array, "#B N"]:
    """The index among the keys of each group-major query's own."""
    _, _, group, count, _ = p.q.shape
    return jnp.reshape(p.offset, (-1, 1)) + jnp.tile(jnp.arange(count), group)


def _reach(p: Problem) -> Int[Array, "#B N"] | None:
    """The number of kept tokens that each query attends to; None for all."""
    return reach_of(p.window, _places(p))


def attend_alone(
    q: Float[Array, "B H N D"],
    kept: KeptTokens,
    *,
    scale: float,
    bias: Bias | None,
    soft_cap: float | None = None,
    reach: Int[Array, "#B N"] | None = None,
) -> tuple[Float[Array, "B H N D"], Float[Array, "B H N"]]:
    """:func:`rows_alone` of group-major queries."""
    given: dict[str, Any] = {"scale": scale, "bias": bias, "soft_cap": soft_cap, "reach": reach}
    peak, mass, out = attend_rows(running_start(*q.shape), q, kept, **given)
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
    soft_cap: float | None = None,
) -> Running:
    """Fold one block of keys and values into a running softmax; ``bias`` is added to the scaled and capped scores."""
    peak, mass, out = running
    scores = jnp.einsum("bhnd,bhsd->bhns", q, k, preferred_element_type=jnp.float32) * scale
    scores = capped(scores, soft_cap)
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
    running: Running,
    q: Float[Array, "B H N D"],
    kept: KeptTokens,
    *,
    scale: float,
    bias: Bias | None = None,
    soft_cap: float | None = None,
    reach: Int[Array, "#B N"] | None = None,
) -> Running:
    """Fold kept tokens into a running softmax, block by block; queries attend to all or the last ``reach``."""

    def body(i: Int[Array, ""], carry: Running) -> Running:
        k, v, visible, added = kept.block_of(i, bias, reach)
        return attend_block(carry, q, k, v, visible, scale=scale, bias=added, soft_cap=soft_cap)

    return jax.lax.fori_loop(kept.first_block(reach), kept.blocks, body, running)


def _attend_causal(running: Running, q: Float[Array, "B H N D"], p: Problem) -> Running:
    """Fold the keys up to each query's own, or those in its window, into a running softmax."""
    own = _places(p)[:, None, :, None]

    def body(j: Int[Array, ""], carry: Running) -> Running:
        kb = jax.lax.dynamic_slice_in_dim(p.k, j * p.block, p.block, axis=2)
        vb = jax.lax.dynamic_slice_in_dim(p.v, j * p.block, p.block, axis=2)
        key = j * p.block + jnp.arange(p.block)
        bias = None if p.bias is None else p.bias(key[None, None])
        return attend_block(carry, q, kb, vb, in_window(own, key, p.window), bias=bias, **_scores(p))

    first, blocks = key_blocks(p.offset, p.q.shape[3], p.block, p.window)
    return jax.lax.fori_loop(first, jnp.minimum(blocks, p.k.shape[2] // p.block), body, running)
