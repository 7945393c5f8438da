"""Inputs for measuring the kernels that read prompts: a chunk of queries at the end of a prompt."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.attention_mass import mass_problem as mass
from pallas_kernels.bench.decode_inputs import stored_dtype
from pallas_kernels.prefill import prefill_problem as prefill


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Sizes of a chunk: the last queries of one prompt.

    Attributes:
      queries: queries of each head. tokens: keys, the queries' own included.
      heads: KV heads. group: query heads a KV head.
      dtype: dtype of the cache; a prompt is read in bfloat16 where that has 8 bits.
    """

    queries: int = 1024
    tokens: int = 4096
    heads: int = 8
    group: int = 4
    head_dim: int = 128
    dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for invalid sizes, before anything is allocated."""
        for name in ("queries", "tokens", "heads", "group", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1.")
        if self.queries > self.tokens:
            raise ValueError(f"queries is {self.queries}; give at most the {self.tokens} tokens they are the last of.")
        stored_dtype(self.dtype)

    def rows(self, nth: int, *shape: int) -> jax.Array:
        """Random numbers of this shape; each ``nth`` gives others."""
        key = jax.random.fold_in(jax.random.key(self.seed), nth)
        dtype = stored_dtype(self.dtype)
        return jax.random.normal(key, shape, jnp.float32).astype(dtype if dtype.itemsize > 1 else jnp.bfloat16)


def prefill_problem(chunk: Chunk) -> prefill.Problem:
    """A ``prefill`` problem with random queries, keys and values."""
    q, k, offset, scale = _queries_and_keys(chunk)
    return prefill.Problem(q, k, chunk.rows(2, *k.shape), offset, None, None, scale, None, chunk.tokens)


def mass_problem(chunk: Chunk) -> mass.Problem:
    """An ``attention_mass`` problem with the same queries and keys."""
    q, k, offset, scale = _queries_and_keys(chunk)
    return mass.Problem(q, k, offset, jnp.full((1,), scale, jnp.float32), None, None, chunk.tokens)


def _queries_and_keys(chunk: Chunk) -> tuple[jax.Array, jax.Array, jax.Array, float]:
    q = chunk.rows(0, 1, chunk.heads, chunk.group, chunk.queries, chunk.head_dim)
    k = chunk.rows(1, 1, chunk.heads, chunk.tokens, chunk.head_dim)
    return q, k, jnp.full((1,), chunk.tokens - chunk.queries, jnp.int32), chunk.head_dim**-0.5
