"""Keys and values kept from earlier tokens, which every query attends to up to each head's length.

With a window a query attends to the last of them alone: ``reach`` [#B, N] of them, for group-major queries. The
tokens are then consecutive, the last right before the chunk's first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

#: A bias [#B, H, N, S] of the scores of some queries (group-major) and the keys at these positions [#B, #H, S]; ALiBi.
Bias = Callable[[Int[Array, "#B #H S"]], Float[Array, "#B #H N S"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeptTokens:
    """Kept keys and values, padded to whole blocks.

    Attributes:
      k, v: finite where there is no token, too. length: tokens of each head; they come first.
      log_mass: added to the score of the first: log N where it stands for N tokens; or None.
      position: of each token, as :data:`Bias` takes them; None where no bias depends on positions.
      block: tokens read at once; divides C.
    """

    k: Float[Array, "B H C D"]
    v: Float[Array, "B H C D"]
    length: Int[Array, "B H"]
    log_mass: Float[Array, "B H"] | None
    position: Int[Array, "B H C"] | None
    block: int = dataclasses.field(metadata={"static": True})

    @property
    def blocks(self) -> Int[Array, ""]:
        """Blocks that hold a token of any head."""
        return jnp.max(-(-self.length // self.block))

    def first_block(self, reach: Int[Array, "#B N"] | None) -> Int[Array, ""]:
        """The first block with a token that some query attends to."""
        if reach is None:
            return jnp.int32(0)
        return jnp.min(jnp.maximum(self.length - reach.max(axis=1)[:, None], 0)) // self.block

    def block_of(
        self, i: Int[Array, ""], linear: Bias | None, reach: Int[Array, "#B N"] | None = None
    ) -> tuple[Float[Array, "B H S D"], Float[Array, "B H S D"], Bool[Array, "B H #N S"], Array | None]:
        """Keys and values of block ``i``, the mask of what queries see, and its scores' bias [B, H, #N, S] or None."""
        k = jax.lax.dynamic_slice_in_dim(self.k, i * self.block, self.block, axis=2)
        v = jax.lax.dynamic_slice_in_dim(self.v, i * self.block, self.block, axis=2)
        slot = i * self.block + jnp.arange(self.block)
        visible = (slot < self.length[..., None])[:, :, None]
        if reach is not None:
            visible &= slot >= (self.length[..., None] - reach[:, None])[..., None]
        bias = None if self.log_mass is None else jnp.where(slot == 0, self.log_mass[..., None], 0.0)[:, :, None]
        if linear is not None and self.position is not None:
            place = jax.lax.dynamic_slice_in_dim(self.position, i * self.block, self.block, axis=2)
            bias = linear(place) if bias is None else linear(place) + bias
        return k, v, visible, bias
