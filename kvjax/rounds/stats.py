"""The report of a turn under RoundAttention, beside the statistics of every generation."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RoundStats:
    """The rounds that a turn under RoundAttention selected, and where the conversation's bytes are.

    Attributes:
      rounds: earlier rounds there were to select from.
      selected: indices of those the question saw, in order.
      attention: qAtt of every earlier round; sums to 1.
      tokens_used: tokens the layers above the watershed attended to when the answer ended: sinks and system prompt,
        what was selected, the turn's own.
      moved_bytes: that came from the host for this question.
      host_bytes: of all rounds' upper layers in host memory after the turn.
      allocated: bytes on each device while the batch's answers were generated: :attr:`kvjax.Stats.device_cache_bytes`.
      peak: bytes on each device at the turn's worst moment: :attr:`kvjax.Stats.device_peak_bytes`.
    """

    rounds: int
    selected: tuple[int, ...]
    attention: tuple[float, ...]
    tokens_used: int
    moved_bytes: int
    host_bytes: int
    allocated: int = dataclasses.field(default=0, compare=False)
    peak: int = dataclasses.field(default=0, compare=False)
