"""H2O: heavy hitters, the tokens that have gathered the most attention, and the recent ones."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.pool import LayerCache
from kvjax.checks import MOST_SLOTS, whole_number
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Candidates, PromptChunk, Signals, Step
from kvjax.policies.evicting import Evicting, attention_weights
from kvjax.policies.option_checks import refuse_unused


@dataclasses.dataclass(frozen=True)
class H2O(Evicting):
    """Keep the tokens with the most accumulated attention and the most recent ones (Zhang et al., arXiv 2306.14048).

    A token's score is the attention it has received from every query since its own: the column sums of the attention
    matrix over the prompt [the AhaKV paper's equation 2], and at each decoded token that token's attention on top. When
    a head is over its budget the lowest score outside the last ``recent`` tokens leaves (the paper's Algorithm 1); the
    newest token is part of that window and has been attended to before anything leaves.

    Size: ``budget`` tokens a head, heavy hitters and recent ones together, or ``ratio`` of the tokens a row has seen
    when a prompt is in; with neither, 2,048. ``recent`` is half of the budget by default, as in the official code
    (``hh_size`` and ``recent_size``).

    Decided where the paper is silent: the query heads of a group add up and their KV head decides once; ties go to the
    later token; a later turn adds the attention of its queries to the scores of what was kept, over prompts and decoded
    tokens alike, and chooses again with the budget of all tokens seen. The official code's prompt pass and this one
    agree; it gives every query head its own choice, by repeating the keys of a group.
    """

    layers_alike: ClassVar[bool] = True

    recent: int | None = None

    def __post_init__(self) -> None:
        if self.recent is not None:
            whole_number("recent", self.recent, 0, MOST_SLOTS)
        super().__post_init__()

    def check(self, config: ModelConfig) -> None:
        if self.recent is None:
            refuse_unused(self, ("keep_turn",), "The recent half of the budget holds a turn's last tokens already")

    @property
    def signals(self) -> Signals:
        return Signals(columns=True, decode_logits=True)

    def smallest(self) -> int:
        return 2 if self.recent is None else self.recent + 1

    def window_of(self, budget: Int[Array, " B"]) -> Int[Array, " B"]:
        return budget // 2 if self.recent is None else jnp.full_like(budget, self.recent)

    def prompt_scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> tuple[Float[Array, "B H N"], Float[Array, "B H N"]]:
        assert candidates.signals.columns is not None
        # Kept tokens bring what they had; new ones start at 0.
        scores = candidates.marks["score"] + candidates.signals.columns.sum(axis=2)
        return scores, scores

    def gains(self, cache: LayerCache, logits: Float[Array, "B P G R"], step: Step) -> Float[Array, "B P R"]:
        return attention_weights(cache, logits, sink_logits=step.sink_logits).sum(axis=2)
