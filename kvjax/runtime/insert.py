"""Rows that join a running batch: each takes the place of one that has ended, in the arrays that are there."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.cache import Cache, resize_layer
from kvjax.cache.quantisation import Storage
from kvjax.runtime.decode import CHUNK, RUNNING, STOP, Controls, DecodeState, record
from kvjax.sharding.compile import Device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Admitted:
    """Rows whose prompts have been read, beside their cache.

    Attributes:
      logits: [N, V] after each prompt. present: [N, V] tokens of the prompt, for the repetition penalty.
      slot: [N] the row of the batch that each becomes; on a mesh, counted among the rows of its own device; -1 of a row
        of padding. Each is another.
      stop_state: [N] where each begins in the stop strings' automaton.
    """

    logits: Float[Array, "N V"]
    present: Bool[Array, "N V"]
    slot: Int[Array, " N"]
    stop_state: Int[Array, " N"]


def empty_state(
    device: Device,
    present: Bool[Array, "B V"],
    *,
    prompt_capacity: int,
    new_capacity: int,
    dtype: Any,
    storage: Storage,
    own_capacity: int | None = None,
) -> DecodeState:
    """A batch of rows that have all ended, with room for others; ``present`` is all False."""
    rows = present.shape[0]
    zeros = jnp.zeros((rows,), jnp.int32)
    return DecodeState(
        cache=device.empty(rows, prompt_capacity, new_capacity, dtype, storage, own_capacity=own_capacity),
        reason=zeros + STOP,
        stop_state=zeros,
        present=present,
        made=zeros,
        tokens=jnp.full((rows, CHUNK), -1, jnp.int32),
        logprobs=jnp.zeros((rows, CHUNK), jnp.float32),
        logits=None,
        first=None,
    )


def insert(
    device: Device, state: DecodeState, cache: Cache, admitted: Admitted, controls: Controls
) -> tuple[DecodeState, Int[Array, " N"], Float[Array, " N"], Int[Array, " N"]]:
    """Draw each admitted row's first token, and put it into its slot; the others keep every bit, and are not copied.

    Args:
      device: unused; every program is given one.
      state: donated. cache: of the admitted; its slots become as many as the state's, which must suffice. A context
        that all share stays where it is.
      controls: the admitted'.

    Returns:
      The state, and of each admitted row its first token, that one's log-probability, and why it has ended, if it has.
    """
    state = dataclasses.replace(state, cache=state.cache.replace(context=None))
    cache, count = cache.replace(context=None), admitted.slot.shape[0]
    there = admitted.slot >= 0
    begun = DecodeState(
        cache=cache.replace(layers=()),
        reason=jnp.where(there, RUNNING, STOP),
        stop_state=admitted.stop_state,
        present=admitted.present,
        made=jnp.zeros((count,), jnp.int32),
        tokens=jnp.full((count, CHUNK), -1, jnp.int32),
        logprobs=jnp.zeros((count, CHUNK), jnp.float32),
        logits=None,
        first=None,
    )
    begun = record(begun, admitted.logits, controls, there, jnp.int32(0))
    first = begun.tokens[:, 0], begun.logprobs[:, 0], begun.reason
    fitted = (resize_layer(new, old.pages) for new, old in zip(cache.layers, state.cache.layers, strict=True))
    same = {name: getattr(state.cache, name) for name in ("prompt_capacity", "new_capacity", "own_capacity")}
    begun = dataclasses.replace(begun, cache=begun.cache.replace(layers=tuple(fitted), **same))

    def put(old: Array, new: Array) -> Array:
        for row in range(count):  # in place, row by row: a scatter would copy all rows on some backends
            here = jnp.where(there[row], admitted.slot[row], 0)
            kept = jax.lax.dynamic_slice_in_dim(old, here, 1, axis=0)
            value = jnp.where(there[row], new[row : row + 1].astype(old.dtype), kept)
            old = jax.lax.dynamic_update_slice_in_dim(old, value, here, axis=0)
        return old

    return jax.tree.map(put, state, begun), *first
