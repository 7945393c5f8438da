"""What a compiled chunk of decode steps takes beside the cache it is given."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import toys

from kvjax.cache.cache import detach
from kvjax.cache.quantisation import Storage
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy
from kvjax.runtime.programs import DECODE_CHUNK
from kvjax.runtime.synthetic import benchmark_controls, decode_state, filled_cache
from kvjax.sharding.compile import OneDevice


def decode_memory(config: ModelConfig, policy: Policy, prompt: int, storage: str = "model") -> tuple[Any, int]:
    """XLA's analysis of a chunk for two rows of ``prompt`` tokens, and the bytes of their pools."""
    cache = filled_cache(config, policy, 2, prompt, storage=Storage(storage))
    given = toys.random_decoder(config), decode_state(config, cache), benchmark_controls(config, 2), jnp.int32(4)
    compiled = DECODE_CHUNK.lower(OneDevice(config, cache.policy), *given).compile()
    return compiled.memory_analysis(), sum(x.nbytes for x in jax.tree.leaves(detach(cache)[0]))
