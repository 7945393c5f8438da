"""Shapes of a chunk of queries against the keys of its prompt, for cases of the kernels that read prompts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ChunkShape:
    """Sizes of a chunk; ``heads`` are KV heads, each with ``group`` query heads."""

    queries: int = 1024
    keys: int = 32768
    head_dim: int = 128
    group: int = 4
    dtype: Any = jnp.bfloat16
    batch: int = 1
    heads: int = 8
    window: int | None = None
    soft_cap: float | None = None

    @property
    def bounds(self) -> dict[str, Any]:
        """Keywords of the operations: a sliding window, a soft cap."""
        return {"window": self.window, "soft_cap": self.soft_cap}

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys."""
        return self.batch * self.heads * self.keys * self.head_dim * jnp.dtype(self.dtype).itemsize

    def rows(self, tokens: int) -> Any:
        """Shape of keys or values [B, H, tokens, D]."""
        return jax.ShapeDtypeStruct((self.batch, self.heads, tokens, self.head_dim), self.dtype)

    def q(self, tokens: int) -> Any:
        """Shape of queries [B, H, G, tokens, D]."""
        return jax.ShapeDtypeStruct((self.batch, self.heads, self.group, tokens, self.head_dim), self.dtype)
