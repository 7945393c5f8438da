"""The cache of a conversation of rounds inside compiled programs: lower layers of one size, upper layers of another."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvjax.cache.buckets import MEDIUM, prompt_bucket, request_bucket
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


def slots_below(config: ModelConfig, tokens: int, *, held: int = 0, spare: int = 0, exact: bool = False) -> int:
    """Slots of each head below the watershed that are allocated for rows of ``tokens``, the question's included.

    Args:
      held: slots that the conversation has there; they stay while they suffice.
      spare: tokens of later turns, beside ``tokens``, where more are made.
      exact: no spare but what buckets have.
    """
    if tokens <= held:
        return held
    if exact:
        return prompt_bucket(tokens)
    return _of_request(config, tokens, tokens + spare)


def _of_request(config: ModelConfig, tokens: int, room: int) -> int:
    """The bucket of a request of so much room, but no more than the model's context or these tokens need."""
    return min(request_bucket(room), max(prompt_bucket(tokens), prompt_bucket(config.max_position)))


def slots_above(config: ModelConfig, tokens: int, *, lasting: bool = True, exact: bool = False) -> int:
    """Slots of each head above the watershed, and of the staging buffer.

    Short conversations all have one size; a question after which there is no other (not ``lasting``) has a request's.
    """
    if exact:
        return prompt_bucket(tokens)
    return max(MEDIUM, prompt_bucket(tokens)) if lasting else _of_request(config, tokens, tokens)
