"""ALiBi: attention with linear biases instead of position embeddings (Press et al., arXiv 2108.12409)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.model.config import ModelConfig


def slopes(config: ModelConfig) -> Float[np.ndarray, "H G"]:
    """Each query head's slope m: its logit of a key loses ``m`` for every token between the query and the key.

    For n heads, a power of two, the slopes are the geometric sequence ``2 ** (-8 i / n)``, i = 1 .. n (section 3).
    For other n the authors' code, which BLOOM follows, takes those of the largest power of two p below n, then every
    second slope of 2 p heads from the first on, until there are n.

    Args:
      config: the model; query heads are numbered as they are stored, the G of KV head 0 first.

    Returns:
      float32 [H, G], positive.
    """
    count = config.num_heads
    power = 1 << (count.bit_length() - 1)
    first = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8 * np.arange(1, 2 * power, 2) / (2 * power))
    values = np.concatenate([first, between])[:count].astype(np.float32)
    return values.reshape(config.num_kv_heads, config.group_size)


@dataclasses.dataclass(frozen=True)
class QueryBias:
    """The biases of a block of queries, ``m (j - i)`` of query i and key j.

    Places may be counted from anywhere, the same for queries and keys. The difference is of whole numbers, and only
    then multiplied: ``m j`` alone, which softmax could not tell from it, loses 0.004 of a logit to float32 at 100,000
    tokens.

    Attributes:
      slopes: [H, N] of each query's head.
      place: [#B, N] of each query.
    """

    slopes: Float[Array, "H N"]
    place: Int[Array, "#B N"]

    def __call__(self, keys: Int[Array, "#B #H S"]) -> Float[Array, "#B H N S"]:
        """Biases of keys at these places."""
        return self.slopes[:, :, None] * (keys[:, :, None] - self.place[:, None, :, None])


def query_bias(config: ModelConfig, place: Int[Array, "#B N"]) -> QueryBias | None:
    """Biases of queries at these places, group-major (N = G x tokens); None for a model without ALiBi."""
    if config.positional != "alibi":
        return None
    each = slopes(config)
    return QueryBias(jnp.asarray(np.repeat(each, place.shape[1] // each.shape[1], axis=1)), place)
