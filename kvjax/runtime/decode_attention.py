"""A layer's attention in a decode step, and what its policy makes of the scores it hands back.

Scores are G float32 numbers a slot. A TPU takes many rows' in turns, a few rows at a time, so that no more than
``PIECE`` bytes of them are ever there: its kernel reads the rows it is asked for out of the whole pool. GPUs and CPUs
take all rows at once: what they add to the scores is small, and a loop costs them more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache.attention import decode_attention
from kvjax.cache.groups import Layer, parts, with_parts
from kvjax.cache.shared_context import SharedLayer
from kvjax.errors import UsageError
from kvjax.policies.base import Policy, Step
from kvjax.policies.traced_checks import check_arrays
from pallas_kernels import dispatch

#: Bytes of scores at a time. Attention reads some thirty times as many to make them: 0.3 ms of a v5e's memory, against
#: which starting its kernel once more is nothing.
PIECE = 8 << 20


def attend(
    policy: Policy,
    index: int,
    kept: Layer,
    q: Float[Array, "B H G D"],
    step: Step,
    *,
    scale: float,
    slopes: Float[np.ndarray, "H G"] | None,
    soft_cap: float | None = None,
    shared: SharedLayer | None = None,
) -> tuple[Float[Array, "B H G D"], Layer]:
    """Attention of one token a row over the layer, whose new token is in, and the layer as its policy leaves it.

    ``shared`` are the slots of a context that come before those of every row, if there are any.

    Raises:
      UsageError: the policy changed keys or values while observing.
    """

    attention = functools.partial(
        _attend_rows, policy, index, scale=scale, slopes=slopes, soft_cap=soft_cap, shared=shared
    )
    pieces = _pieces(policy, kept, q)
    if pieces == 1:
        return attention(q, kept, kept, step, None)
    return _attend_in_pieces(attention, pieces, policy, kept, q, step)


def _attend_rows(
    policy: Policy,
    index: int,
    q: Float[Array, "B H G D"],
    whole: Layer,
    own: Any,  # a layer
    step: Step,
    first: Array | None,
    *,
    shared: SharedLayer | None,
    **numbers: Any,
) -> tuple[Float[Array, "B H G D"], Layer]:
    """:func:`attend` for some rows of a layer: ``own`` are theirs, from row ``first`` of the ``whole`` on."""
    out, logits = decode_attention(
        q,
        whole,
        position=step.position,
        with_logits=policy.signals.decode_logits,
        first_row=first,
        shared=shared,
        sink_logits=step.sink_logits,
        **numbers,
    )
    if logits is not None:
        # XLA would begin with what the policies of all layers ask of positions alone, and keep it.
        out, position = jax.lax.optimization_barrier((out, step.position))
        step = dataclasses.replace(step, position=position)
    seen = policy.observe(index, own, logits, step)
    check_arrays(policy, "observe", own, seen)
    if logits is not None:
        # What they decide before the next layer: XLA would keep every layer's logits for the end of the step.
        out, chosen = jax.lax.optimization_barrier((out, [pool.next for pool in parts(seen)]))
        seen = with_parts(seen, [pool.replace(next=x) for pool, x in zip(parts(seen), chosen, strict=True)])
    return out, seen


def _attend_in_pieces(
    attention: Callable[..., tuple[Array, Layer]],
    pieces: int,
    policy: Policy,
    kept: Layer,
    q: Float[Array, "B H G D"],
    step: Step,
) -> tuple[Float[Array, "B H G D"], Layer]:
    """:func:`attend` by equal parts of the rows, one after another.

    The loop carries the layer without its pages, which nothing may change.
    """
    rows = q.shape[0] // pieces
    pages = [pool.kv for pool in parts(kept)]

    def with_pages(rest: Layer) -> Layer:
        return with_parts(rest, [pool.replace(kv=kv) for pool, kv in zip(parts(rest), pages, strict=True)])

    def without_pages(layer: Layer) -> Layer:
        return with_parts(layer, [pool.replace(kv=None) for pool in parts(layer)])

    def piece(i: Array, carry: tuple[Array, Layer]) -> tuple[Array, Layer]:
        first = i * jnp.int32(rows)

        def cut(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, first, rows)

        def put(x: Array, part: Array, before: Array | None = None) -> Array:
            return x if part is before else jax.lax.dynamic_update_slice_in_dim(x, part, first, 0)

        attended, rest = carry
        whole = with_pages(rest)
        own = jax.tree.map(cut, whole)  # its keys and values only if the policy reads them
        out, seen = attention(cut(q), whole, own, jax.tree.map(cut, step), first)
        if any(new.kv is not old.kv for new, old in zip(parts(seen), parts(own), strict=True)):
            raise UsageError(f"{type(policy).__name__}.observe must leave keys and values as they are.")
        return put(attended, out), jax.tree.map(put, rest, without_pages(seen), without_pages(own))

    attended, rest = jax.lax.fori_loop(0, pieces, piece, (jnp.zeros_like(q), without_pages(kept)))
    return attended, with_pages(rest)


def _pieces(policy: Policy, kept: Layer, q: Array) -> int:
    """In how many equal parts the rows are taken: as few as keep each part's scores within ``PIECE``."""
    batch = q.shape[0]
    if not policy.signals.decode_logits or dispatch.platform() != "tpu":
        return 1
    a_row: int = sum(4 * q.shape[2] * sum(pool.slots) for pool in parts(kept))
    return next(n for n in range(1, batch + 1) if batch % n == 0 and (n == batch or a_row * (batch // n) <= PIECE))
