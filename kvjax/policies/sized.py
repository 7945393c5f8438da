"""Policies of a size, a budget of tokens or a fraction of them: those that score tokens, and of these the ones that
select at each prompt and turn."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pool import LayerCache
from kvjax.checks import MOST_SLOTS, number, whole_number
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.policies.base import (
    Candidates,
    HostOrTraced,
    Policy,
    PromptChunk,
    Selection,
    floor_fraction,
    numpy_or_jax,
    per_head,
    selection,
    top_mask,
)
from kvjax.policies.option_checks import only_one
from kvjax.policies.traced_checks import check_protected, check_scores, own_within


@dataclasses.dataclass(frozen=True)
class Sized(Policy):
    """A policy whose heads keep ``budget`` tokens, or ``ratio`` of the tokens a row has seen when a prompt is in.

    With neither, ``default`` says which. A ratio that gives less than :meth:`smallest` is raised to it.

    On a later turn, such as a question asked of a context that was compressed before, the last ``keep_turn`` of its
    tokens stay whatever they score, as far as half of the budget goes; 0 lets them take their chances, which cost no
    answer where it was measured.
    """

    budget: int | None = None
    ratio: float | None = None
    keep_turn: int = dataclasses.field(default=0, kw_only=True)

    #: The size when none is given: {"budget": tokens} or {"ratio": fraction}.
    default: ClassVar[dict[str, Any]] = {"budget": 2048}

    def __post_init__(self) -> None:
        only_one(type(self).__name__, budget=self.budget, ratio=self.ratio)
        if self.budget is None and self.ratio is None:
            for name, value in self.default.items():
                object.__setattr__(self, name, value)
        whole_number("keep_turn", self.keep_turn, 0, MOST_SLOTS)
        if self.ratio is not None:
            number("ratio", self.ratio, 0, 1, open_below=True)
        if self.budget is not None:
            whole_number("budget", self.budget, 1, MOST_SLOTS)
            if self.budget < self.smallest():
                raise UsageError(
                    f"A budget of {self.budget} tokens is smaller than what {type(self).__name__} always keeps; "
                    f"give at least {self.smallest()}."
                )

    def smallest(self) -> int:
        """The least budget that leaves something to choose."""
        return 1

    def size(self, config: ModelConfig, layer: int, total: HostOrTraced) -> Any:
        """Tokens a head of this layer keeps of a row that has seen ``total``, before the row's own length bounds it.

        NumPy in, NumPy out; an array of the shape of ``total``.
        """
        xp = numpy_or_jax(total)
        if self.ratio is not None:
            return xp.maximum(floor_fraction(self.ratio, total), self.smallest())
        return xp.full(xp.shape(total), self.budget, xp.int32)

    def budgets(self, config: ModelConfig, layer: int, total: HostOrTraced) -> HostOrTraced:
        xp = numpy_or_jax(total)
        kept = xp.minimum(total, self.size(config, layer, total))
        return per_head(kept, config)

    def of_turn(
        self, candidates: Candidates, chunk: PromptChunk, budget: Int[Array, " B"], sure: Bool[Array, "B H N"]
    ) -> Bool[Array, "B H N"]:
        """The candidates that ``keep_turn`` protects beside those that are ``sure`` to stay: none of a first prompt."""
        if chunk.fresh or not self.keep_turn:
            return jnp.zeros_like(sure)
        most = jnp.minimum(jnp.minimum(self.keep_turn, chunk.count), budget // 2)[:, None]
        first = candidates.length - jnp.where(candidates.kept > 0, most, 0)
        last = jnp.arange(sure.shape[-1]) >= first[..., None]
        # Never more than the budget together: of those beyond it the latest stay.
        wanted = last & candidates.valid & ~sure
        room = jnp.maximum(budget[:, None] - sure.sum(axis=-1, dtype=jnp.int32), 0)
        from_end = jnp.cumsum(wanted[..., ::-1], axis=-1)[..., ::-1]
        return wanted & (from_end <= room[..., None])

    def most(self, config: ModelConfig, layer: int, prompt: int) -> int:
        """The most tokens a head of this layer keeps of any row of at most ``prompt`` tokens."""
        return min(int(self.size(config, layer, np.asarray([prompt]))[0]), prompt)


@dataclasses.dataclass(frozen=True)
class Scoring(Sized):
    """A sized policy that scores the tokens of a prompt: what another policy may choose by, see ``inner.py``."""

    #: Whether :meth:`scores` gives logarithms of what would be summed.
    log_scores: ClassVar[bool] = False
    #: Whether they are attention, or a factor of it: never below 0 but for logarithms.
    attention_scores: ClassVar[bool] = False

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        """How much each candidate is worth, float32; rows that are not valid may hold anything finite."""
        raise UsageError(f"{type(self).__name__} has no scores; write the method, or select.")

    def protected(self, candidates: Candidates, chunk: PromptChunk) -> Bool[Array, "B H N"]:
        """Candidates that stay whatever they score."""
        return jnp.zeros(candidates.k.shape[:3], bool)

    def chosen_first(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Bool[Array, "B H N"]:
        """Candidates that a head chose before others: their scores are no scores to compare heads by."""
        return jnp.zeros(candidates.k.shape[:3], bool)

    def marks_after(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> dict[str, Array]:
        """Marks of the candidates that this selection changes, by name."""
        return {}

    def state_after(self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> Any:
        """The layer's state after this selection."""
        return cache.state


@dataclasses.dataclass(frozen=True)
class Selecting(Scoring):
    """Selects at each prompt and later turn, over kept, decoded and new tokens; what is decoded after it all stays."""

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        slots = [self.most(config, layer, prompt) + new for layer in range(config.num_layers)]
        return tuple((count,) * config.num_kv_heads for count in slots)

    def select(self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> Selection:
        budget = self.size(chunk.config, layer, chunk.total)[:, None]
        valid = candidates.valid
        protected = self.protected(candidates, chunk)
        check_protected(self, protected, valid)
        sure = protected & valid
        sure = sure | self.of_turn(candidates, chunk, budget[:, 0], sure)
        scores = self.scores(layer, cache, candidates, chunk)
        check_scores(self, scores, valid)
        free = budget - sure.sum(axis=-1, dtype=jnp.int32)
        keep = sure | top_mask(scores, jnp.maximum(free, 0), valid & ~sure)
        # A row that fits its budget is left untouched, and so is a row with nothing to read this time.
        whole = (candidates.length <= budget) | (chunk.count == 0)[:, None]
        keep = jnp.where(whole[..., None], valid, keep)
        marks = self.marks_after(layer, cache, candidates, chunk)
        chosen = selection(cache, candidates, keep, marks, state=self.state_after(layer, cache, candidates, chunk))
        if own_within(self) is None:  # those of kvjax have tests
            return chosen
        unranked = (jnp.isnan(scores) & valid & ~sure).any(axis=-1) & ~whole
        return dataclasses.replace(chosen, unranked=unranked)


class SelectingPastSinks(Selecting):
    """Base of those whose first ``sink`` tokens stay; the class declares ``sink`` where it is among its options."""

    sink: int

    def smallest(self) -> int:
        return self.sink + 1

    def protected(self, candidates: Candidates, chunk: PromptChunk) -> Bool[Array, "B H N"]:
        # Sinks never leave, so they are the first candidates of every turn.
        return candidates.valid & (jnp.arange(candidates.k.shape[2]) < self.sink)
