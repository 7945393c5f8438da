"""The cache of a conversation of rounds inside compiled programs: lower layers of one size, upper layers of another."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy


@dataclasses.dataclass(frozen=True)
class SplitCache(Policy):
    """Keep every token that was placed: all rounds below the watershed, the selected ones above it.

    Attributes:
      watershed: layers that hold all rounds.
      upper_capacity: slots of each head of the other layers, beside those for decoded tokens.
    """

    layers_alike: ClassVar[bool] = True

    watershed: int
    upper_capacity: int = 0

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        heads = config.num_kv_heads
        upper = config.num_layers - self.watershed
        return ((prompt + new,) * heads,) * self.watershed + ((self.upper_capacity + new,) * heads,) * upper
