"""Refuses what a policy of somebody's own selects, while a program is traced, where its shapes show a mistake."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from kvjax.errors import UsageError
from kvjax.policies.candidates import Selection


def check_selection(name: str, chosen: Any, valid: Bool[Array, "B H N"]) -> None:
    """Refuse a selection of another type, a mask of another shape, and state that does not lead with the batch.

    Raises:
      UsageError: the sentence names the method of the policy ``name``.
    """
    if not isinstance(chosen, Selection):
        raise UsageError(f"{name}.select gives a {type(chosen).__name__}; give a kvjax.policies.Selection.")
    keep = jnp.asarray(chosen.keep)
    if keep.shape != valid.shape or keep.dtype != bool:
        raise UsageError(
            f"{name}.select gives a mask of {keep.dtype} numbers of shape {keep.shape}; give booleans of the shape of "
            f"candidates.valid, {valid.shape}."
        )
    for leaf in jax.tree.leaves(chosen.state):
        if jnp.shape(leaf)[:1] != valid.shape[:1]:
            raise UsageError(
                f"{name}.select gives state with an array of shape {jnp.shape(leaf)} for {valid.shape[0]} rows; every "
                "array's first axis is the batch."
            )
