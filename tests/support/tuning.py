"""Problems that tests of tuned sizes share."""

import jax.numpy as jnp
from support.decode_base import Case, build

from pallas_kernels.bench.chunk_inputs import Chunk
from pallas_kernels.tunable import OPERATIONS

DECODE, PREFILL, LSE, MASS = OPERATIONS.values()
CHUNK = Chunk(queries=160, tokens=512, heads=1, group=2, head_dim=64, dtype="float32")


def problem(**changes):
    """A decode step of bfloat16 pages."""
    return build(Case(((70, 30),), (5, 2), head_dim=16, dtype=jnp.bfloat16, page_size=64, **changes), "stacked")
