"""``log_sum_exp`` and ``attention_mass``: windows and chunks over head sizes, groups and dtypes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention_mass import Masses, attention_mass, log_sum_exp
from tools.aot.cases import Case
from tools.aot.chunk_shape import ChunkShape

IMPLEMENTATIONS = {"tpu": "tpu", "gpu": "triton"}
#: Registers that a layer with masses may spill, prefill's kernel included.
SPILLS = 0
#: Spilled registers that are allowed, by platform and case: JAX 0.10.2's compiler for TPU7x spills a few, Triton's for
#: sm_80 one.
_SPILLS = {
    ("tpu", "window of 32, G = 4, D = 128, float32"): 6,
    ("gpu", "sliding over 4,096, columns of 1,024, G = 4, D = 128, bfloat16"): 1,
}


@dataclasses.dataclass(frozen=True)
class Shape(ChunkShape):
    """Queries against keys; a window by default."""

    queries: int = 32

    def arrays(self) -> dict[str, Any]:
        """Shapes of the operations' common arguments."""
        shape = jax.ShapeDtypeStruct
        return {
            "q": self.q(self.queries),
            "k": self.rows(self.keys),
            "offset": shape((self.batch,), jnp.int32),
            "scale": shape((self.batch,), jnp.float32),
        }

    def total(self) -> Any:
        """Shape of the masses of earlier chunks."""
        return jax.ShapeDtypeStruct((self.batch, self.heads, self.group, self.keys), jnp.float32)


def _window(arrays: dict[str, Any], **options: Any) -> Any:
    """Both passes over the keys, as for the observation window of a prompt."""
    lse = log_sum_exp(**arrays, **options)
    weight = jnp.ones((arrays["q"].shape[0], arrays["q"].shape[3]), jnp.float32)
    return attention_mass(**arrays, lse=lse, weight=weight, **options).new


def _columns(arrays: dict[str, Any], lse: Any, onto: Any, **options: Any) -> Any:
    """A chunk's column sums, added to those of earlier chunks."""
    return attention_mass(**arrays, lse=lse, onto=Masses(onto, None), **options).new


def cases() -> list[Case]:
    """Every case."""
    windows = {
        "window of 32, G = 4, D = 128, bfloat16": Shape(),
        "window of 64, G = 8, D = 128, bfloat16, 4 rows": Shape(64, group=8, batch=4),
        "window of 32, G = 3, D = 64, bfloat16": Shape(group=3, head_dim=64, heads=3),
        "window of 32, G = 1, D = 80, bfloat16": Shape(group=1, head_dim=80),
        "window of 16, G = 4, D = 256, bfloat16": Shape(16, head_dim=256, heads=4),
        "window of 32, G = 4, D = 128, float32": Shape(dtype=jnp.float32),
        "window of a tenth, G = 4, D = 128, bfloat16": Shape(3280),
        "soft cap, window of 32, G = 2, D = 256, bfloat16": Shape(group=2, head_dim=256, soft_cap=50.0),
        "sliding over 4,096, window of 32, G = 4, D = 128, bfloat16": Shape(window=4096),
    }
    chunks = {
        "columns of 1,024, G = 4, D = 128, bfloat16": Shape(1024),
        "columns of 1,024, G = 1, D = 64, bfloat16": Shape(1024, group=1, head_dim=64),
        "columns of 1,024, G = 16, D = 256, bfloat16": Shape(1024, group=16, head_dim=256, heads=4),
        "columns of 256, G = 8, D = 128, float32": Shape(256, group=8, dtype=jnp.float32),
        "soft cap, columns of 1,024, G = 2, D = 256, bfloat16": Shape(1024, group=2, head_dim=256, soft_cap=50.0),
        "sliding over 4,096, columns of 1,024, G = 4, D = 128, bfloat16": Shape(1024, window=4096),
        "sliding over 1,024, soft cap, columns of 256, G = 8, D = 128, float32": Shape(
            256, group=8, dtype=jnp.float32, window=1024, soft_cap=50.0
        ),
    }
    found = []
    for platform, implementation in IMPLEMENTATIONS.items():
        for name, shape in windows.items():
            function = functools.partial(_window, implementation=implementation, **shape.bounds)
            # Zeros that the masses are added to; on TPU in tiles of 4 heads.
            zeros = 4 * shape.batch * shape.heads * (-(-shape.group // 4) * 4) * shape.keys
            found.append(_case(platform, name, shape, function, (shape.arrays(),), zeros))
        for name, shape in chunks.items():
            function = functools.partial(_columns, implementation=implementation, **shape.bounds)
            lse = jax.ShapeDtypeStruct((shape.batch, shape.heads, shape.group, shape.queries), jnp.float32)
            arguments = (shape.arrays(), lse, shape.total())
            found.append(_case(platform, name, shape, function, arguments, 0, donated=(2,)))
    return found


def _case(platform: str, name: str, shape: Shape, function: Any, arguments: Any, zeros: int, **more: Any) -> Case:
    """A case whose temporary memory is at most 1 % of the keys, ``zeros``, and the queries padded to 128 lanes."""
    rows = shape.batch * shape.heads * shape.group * shape.queries
    padded = rows * max(shape.head_dim, 128) * jnp.dtype(shape.dtype).itemsize + 64 * rows
    more |= dict(kernels=("log_sum_exp", "attention_mass"), spills=_SPILLS.get((platform, name), 0))
    limit = 0.01 + (zeros + padded) / shape.key_bytes
    return Case(name, "attention_mass", function, arguments, shape.key_bytes, (platform,), temp_limit=limit, **more)
