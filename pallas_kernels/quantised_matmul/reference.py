"""NumPy reference in float64; for tests."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantised_matmul.matmul_problem import Problem


def weights(p: Problem) -> np.ndarray:
    """The matrix [N, K], number by number from what the layout says."""
    values = np.asarray(p.values)
    tiles, _, tile = values.shape
    bits, group = 4 if values.dtype == np.uint8 else 8, p.group
    scale, minimum = (None if x is None else _floats(np.asarray(x)) for x in (p.scale, p.minimum))
    assert scale is not None
    found = np.empty((p.outputs, tiles * tile))
    for n in range(p.outputs):
        held = values[:, n // 2 if bits == 4 else n].reshape(-1)
        row = held.view(jnp.float8_e4m3fn).astype(np.float64) if p.fp8 else held.astype(np.int64)
        if bits == 4:
            half = row // 16 if n % 2 else row % 16
            row = np.where(half > 7, half - 16, half)
        if p.fp4:
            doubled = np.array([0, 1, 2, 3, 4, 6, 8, 12])
            row = np.sign(row) * doubled[np.abs(row)]
        if minimum is not None and bits == 4:
            row = row + 8
        found[n] = row * np.repeat(scale[:, n], group)
        if minimum is not None:
            found[n] += np.repeat(minimum[:, n], group)
    return found


def _floats(scale: np.ndarray) -> np.ndarray:
    return (scale.view(np.float16) if scale.dtype == np.int16 else scale).astype(np.float64)


def quantised_matmul(p: Problem) -> np.ndarray:
    """See :func:`pallas_kernels.quantised_matmul.quantised_matmul`."""
    return np.asarray(p.x.astype("float32"), np.float64) @ weights(p).T
