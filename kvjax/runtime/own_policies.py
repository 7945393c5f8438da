"""Bounds that steps of a user's own policy must keep, in compiled programs, where nothing can be raised.

A row for which it is wrong ends, and its first layer's lengths become a number that the host refuses when it reads them
(``kvjax/policies/guard.py``). Policies that come with kvjax have tests, and their programs none of this.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache.groups import Layer, parts, with_parts
from kvjax.policies.base import BEFORE_THE_FIRST, STILL_DUE, Policy
from kvjax.policies.traced_checks import own_within


def with_next_checked(policy: Policy, layer: Layer, active: Bool[Array, " B"]) -> Layer:
    """A layer after a step, marked where the slot that is written next is none of its head's."""
    if own_within(policy) is None:
        return layer
    pools = []
    for pool in parts(layer):
        wrong = active[:, None] & ((pool.next < 0) | (pool.next > jnp.asarray(pool.most_slots)))
        pools.append(pool.replace(length=jnp.where(wrong, BEFORE_THE_FIRST, pool.length)))
    return with_parts(layer, pools)


def with_row_still_due(layer: Layer, row: Int[Array, ""], due: Bool[Array, ""]) -> Layer:
    """A layer marked where a row that was compacted is due again at once."""
    pools = []
    for pool in parts(layer):
        length = jnp.where(due, STILL_DUE, pool.length[row])
        pools.append(pool.replace(length=pool.length.at[row].set(length)))
    return with_parts(layer, pools)
