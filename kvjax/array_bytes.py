"""Bytes of arrays, and of those that are only described."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np


def nbytes(tree: Any) -> int:
    """Bytes of a tree's arrays, or of those that its shapes describe; on a mesh of every array once."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
