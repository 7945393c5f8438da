"""ALiBi: attention with linear biases instead of position embeddings (Press et al., arXiv 2108.12409)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from kvjax.config import ModelConfig


def slopes(config: ModelConfig) -> Float[np.ndarray, "H G"]:
    """Each query head's slope m: its logit of a key loses ``m`` for every token between the query and the key.

    For n heads, a power of two, the slopes are the geometric sequence ``2 ** (-8 i / n)``, i = 1 .. n (section 3).
    For other n the authors' code, which BLOOM follows, takes those of the largest power of two p below n, then every
    second slope of 2 p heads from the first on, until there are n.

    Args:
      config: the model; query heads are numbered as they are stored, the G of KV head 0 first.

    Returns:
      float32 [H, G], positive. A row of softmax does not change when a constant is added, so ``-m (i - j)`` of query
      i and key j may be computed as ``m (j - r)`` for any r that is the same for all keys of the query. Attention
      takes an r near the query: float32 would lose 0.004 of a logit in ``m j`` at 100,000 tokens.
    """
    count = config.num_heads
    power = 1 << (count.bit_length() - 1)
    first = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8 * np.arange(1, 2 * power, 2) / (2 * power))
    values = np.concatenate([first, between])[:count].astype(np.float32)
    return values.reshape(config.num_kv_heads, config.group_size)
