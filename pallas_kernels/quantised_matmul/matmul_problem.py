"""The input :class:`Problem` of every implementation of ``quantised_matmul``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised_matmul import weight_tiles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of :func:`~pallas_kernels.quantised_matmul.api.quantised_matmul`, checked; see there."""

    x: Float[Array, "S K"]
    values: Int[Array, "T M L"]
    scale: Float[Array, "G N"] | Int[Array, "G N"]
    minimum: Float[Array, "G N"] | Int[Array, "G N"] | None
    fp8: bool = dataclasses.field(default=False, metadata={"static": True})
    fp4: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def bits(self) -> int:
        """Bits of a weight's number."""
        return weight_tiles.bits_of(self.values)

    @property
    def outputs(self) -> int:
        """N."""
        return self.scale.shape[1]

    @property
    def tile(self) -> int:
        """Inputs of a tile of the layout."""
        return self.values.shape[2]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.x.shape[1] // self.scale.shape[0]

    def sums(self, x: Float[Array, "S K"]) -> Float[Array, "S G"]:
        """Sums of activations over groups, float32, which minima are multiplied by."""
        return x.astype(jnp.float32).reshape(len(x), self.scale.shape[0], self.group).sum(axis=-1)
