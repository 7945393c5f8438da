"""Layouts of weights in a chip's memory, where a matrix product wants another than the default.

A TPU7x multiplies bfloat16 matrices in tiles of 16 rows, and the default of arrays is tiles of 8: within a loop the
compiler copies every weight into the other form first, once a chunk of tokens (compiled ahead of time, libtpu 0.0.42:
2.8 GB of temporary memory for 4 layers of Llama 3 8B; none with weights in tiles of 16, which take as many bytes).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.typing import DTypeLike


def weight_layout(kind: str, dtype: DTypeLike, ndim: int) -> Any:
    """The layout of a weight on this kind of device, or None for its default.

    Args:
      kind: as ``jax.Device.device_kind`` says it, such as "TPU7x".
    """
    if kind.lower().startswith("tpu7") and jnp.dtype(dtype) == jnp.bfloat16 and ndim in (2, 3):
        return Layout(major_to_minor=tuple(range(ndim)), tiling=((16, 128), (2, 1)))
    return None


def tiled(weight: jax.Array) -> jax.Array:
    """The weight as its devices multiply it; itself where that is how it is."""
    kind = next(iter(weight.sharding.device_set)).device_kind
    layout = weight_layout(kind, weight.dtype, weight.ndim)
    if layout is None:
        return weight
    return jax.jit(lambda x: x, out_shardings=Format(layout, weight.sharding))(weight)
