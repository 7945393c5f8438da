"""Policies that drop a token at every step: the new one takes part in attention, then the worst one leaves."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.pool import LayerCache, by_head, by_page, mark_rows, rows, store
from kvjax.config import ModelConfig
from kvjax.policies.base import Candidates, Selection, Signals, Step, Turn, append_new, selection, top_mask
from kvjax.policies.sized import Sized


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EvictState:
    """What an evictor counts beside its marks.

    Attributes:
      budget: [B] slots a head of the row may hold between steps, fixed when its last prompt was read.
      own: arrays of the policy at hand, leading with the batch axis, or None.
    """

    budget: Int[Array, " B"]
    own: Any = None


@dataclasses.dataclass(frozen=True)
class Evicting(Sized):
    """Keeps ``budget`` tokens a head at all times, the last ``recent`` of them whatever they score.

    A head has one slot more than its budget. A token that leaves stays in its slot until the next one is written over
    it: between steps the slot ``next``, when it is below ``length``, holds a token that has left. Slots are in no
    order; ties between scores go to the later position.
    """

    recent: int | None = None

    grows: ClassVar[bool] = False
    marks: ClassVar[tuple[str, ...]] = ("position", "score")

    def gains(self, cache: LayerCache, logits: Float[Array, "B P G R"], step: Step) -> Float[Array, "B P R"]:
        """What this step's query adds to every slot's score, from its scaled logits by page."""
        raise NotImplementedError

    def prompt_scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, turn: Turn
    ) -> tuple[Float[Array, "B H N"], Float[Array, "B H N"]]:
        """(scores to select a prompt's tokens by, scores that decoding starts from), float32."""
        raise NotImplementedError

    def own_state(self, config: ModelConfig, layer: int, batch: int) -> Any:
        """The policy's own arrays in a cache that has seen nothing."""
        return None

    def own_after(self, layer: int, cache: LayerCache, candidates: Candidates, turn: Turn) -> Any:
        """The policy's own arrays after a prompt."""
        return cache.state.own

    @property
    def signals(self) -> Signals:
        return Signals(columns=True, decode_logits=True)

    def window_of(self, budget: Int[Array, " B"]) -> Int[Array, " B"]:
        """Recent tokens that cannot leave, for rows of these budgets."""
        return jnp.minimum(jnp.full_like(budget, self.recent or 0), budget)

    # --- prompts ----------------------------------------------------------------------------------------------

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        # A short prompt's row fills up to its budget while decoding.
        slots = [int(self.size(config, layer, np.asarray([prompt]))[0]) + 1 for layer in range(config.num_layers)]
        return tuple((count,) * config.num_kv_heads for count in slots)

    def init_state(self, config: ModelConfig, layer: int, batch: int, slots: tuple[int, ...]) -> Any:
        return EvictState(jnp.zeros((batch,), jnp.int32), self.own_state(config, layer, batch))

    def settle(self, layer: int, cache: LayerCache, config: ModelConfig) -> LayerCache:
        """Drop the token that has left and put the others in order of position."""
        k, v = rows(cache)
        slot = jnp.arange(k.shape[2])
        live = (slot < cache.length[..., None]) & (slot != cache.next[..., None])
        order = jnp.argsort(jnp.where(live, mark_rows(cache, "position"), jnp.iinfo(jnp.int32).max), axis=-1)
        k, v = (jnp.take_along_axis(x, order[..., None], axis=2) for x in (k, v))
        marks = {name: jnp.take_along_axis(mark_rows(cache, name), order, axis=2) for name in cache.marks}
        return store(cache, k, v, live.sum(axis=-1, dtype=jnp.int32), cache.pages, marks)

    def retained(self, cache: LayerCache) -> Int[Array, "B H"]:
        return cache.length - (cache.next < cache.length)

    def select(self, layer: int, cache: LayerCache, candidates: Candidates, turn: Turn) -> Selection:
        budget = self.size(turn.config, layer, turn.total)
        # Shapes come from buckets and a later turn never shrinks a head's run below what the budget asks for.
        chosen_by, start = self.prompt_scores(layer, cache, candidates, turn)
        valid, last = candidates.valid, candidates.length[..., None]
        sure = valid & (jnp.arange(candidates.k.shape[2]) >= last - self.window_of(budget)[:, None, None])
        free = budget[:, None] - sure.sum(axis=-1, dtype=jnp.int32)
        keep = sure | top_mask(chosen_by, jnp.maximum(free, 0), valid & ~sure)
        keep = jnp.where((candidates.length <= budget[:, None])[..., None], valid, keep)
        state = EvictState(budget, self.own_after(layer, cache, candidates, turn))
        return selection(cache, candidates, keep, {"score": start}, state=state)

    # --- steps ------------------------------------------------------------------------------------------------

    def append(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H D"], v: Float[Array, "B H D"], step: Step
    ) -> LayerCache:
        return append_new(cache, k, v, step)  # its score starts at 0; ``next`` is chosen after attention

    def observe(self, layer: int, cache: LayerCache, logits: Float[Array, "B P G R"] | None, step: Step) -> LayerCache:
        assert logits is not None
        active = step.active[:, None, None]
        score = cache.marks["score"] + jnp.where(active, self.gains(cache, logits, step), 0.0)
        position = cache.marks["position"]
        seen = step.position + 1  # the new token is in
        recent = self.window_of(cache.state.budget)
        may_leave = position < (seen - recent)[:, None, None]
        slot = by_page(cache, jnp.broadcast_to(jnp.arange(max(cache.slots)), (1, len(cache.pages), max(cache.slots))))
        length = _per_page(cache, cache.length)
        candidate = (slot < length[..., None]) & may_leave
        worst = self._worst(cache, jnp.where(candidate, score, jnp.inf), position)
        over = cache.length > cache.state.budget[:, None]
        following = jnp.where(over, worst, cache.length)
        following = jnp.where(step.active[:, None], following, cache.next)
        return cache.replace(marks={**cache.marks, "score": score}, next=following)

    def _worst(
        self, cache: LayerCache, score: Float[Array, "B P R"], position: Int[Array, "B P R"]
    ) -> Int[Array, "B H"]:
        """The slot of each head with the lowest score, the earliest position among equals."""
        by = by_head(cache, score)
        if not cache.uniform:
            inside = jnp.arange(by.shape[-1]) < jnp.asarray(cache.slots)[:, None]
            by = jnp.where(inside, by, jnp.inf)
        lowest = by.min(axis=-1, keepdims=True)
        place = jnp.where(by == lowest, by_head(cache, position), jnp.iinfo(jnp.int32).max)
        return place.argmin(axis=-1).astype(jnp.int32)


def _per_page(cache: LayerCache, x: Int[Array, "B H"]) -> Int[Array, "B P"]:
    """A head's number on each of its pages."""
    return jnp.repeat(x, jnp.asarray(cache.pages), axis=1, total_repeat_length=sum(cache.pages))
