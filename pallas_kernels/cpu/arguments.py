"""Arguments of the functions in C++."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array


def or_empty(x: Array | np.ndarray | None, dtype: DTypeLike) -> Array:
    """An argument as this type, or an array of no elements in place of one that is not given: each has its position."""
    return jnp.zeros((0,), dtype) if x is None else jnp.asarray(x, dtype)
