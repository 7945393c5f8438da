"""Policies that drop a token at every step: the new one takes part in attention, then the worst one leaves."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import runs
from kvjax.cache.packing import store
from kvjax.cache.pool import LayerCache, by_head, by_page, keys_and_values, mark_by_head
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Candidates, HostOrTraced, PromptChunk, Selection, Step, append_new, selection, top_mask
from kvjax.policies.sized import Scoring

_LAST = jnp.iinfo(jnp.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EvictState:
    """The state of an evicting policy beside its marks.

    Attributes:
      budget: slots a head of the row may hold between steps, fixed when its last prompt was read: [B], or [B, H] where
        heads share a budget.
      own: arrays of the policy at hand, leading with the batch axis, or None.
      equal: [B] the budget of an equal head where heads share one, else None.
    """

    budget: Int[Array, " B"] | Int[Array, "B H"]
    own: Any = None
    equal: Int[Array, " B"] | None = None

    @property
    def of_heads(self) -> Int[Array, "B _"]:
        """The budget of each head."""
        return self.budget[:, None] if self.equal is None else self.budget

    @property
    def of_equal_head(self) -> Int[Array, " B"]:
        """The budget that each head has where they do not differ."""
        return self.budget if self.equal is None else self.equal

    def shared(self, kept: Int[Array, "B H"], equal: Int[Array, " B"], count: Int[Array, " B"]) -> EvictState:
        """The state after a prompt whose tokens the heads have divided: each may hold as many as it has ``kept``.

        What they leave of a budget of ``equal`` slots a head is for all to grow by the same number. A row that reads
        nothing (``count``) keeps its budgets; 0 is those of a row that never read.
        """
        assert self.equal is not None
        heads = kept.shape[1]
        spare = jnp.maximum(heads * equal - kept.sum(axis=1, dtype=jnp.int32), 0) // heads
        reads = (count > 0) | (self.equal == 0)
        budget = jnp.where(reads[:, None], kept + spare[:, None], self.budget)
        return dataclasses.replace(self, budget=budget, equal=jnp.where(reads, equal, self.equal))


@dataclasses.dataclass(frozen=True)
class Evicting(Scoring):
    """Keeps ``budget`` tokens a head at all times.

    A head has one slot more than its budget. A token that leaves stays in its slot until the next one is written over
    it: between steps the slot ``next``, when it is below ``length``, holds a token that has left. Slots are in no
    order; ties between scores go to the later position. A subclass gives :meth:`prompt_scores`, and :meth:`gains` to
    accumulate a score over the steps or :meth:`rank` to judge each step by itself.

    Under :class:`~kvjax.policies.adaptive.AdaptiveHeads` the heads of a layer divide the tokens of a prompt by its
    scores, and each then drops a token at every step as here, once it holds as many as it has been given.
    """

    grows: ClassVar[bool] = False
    marks: ClassVar[tuple[str, ...]] = ("position", "score")
    #: Whether all heads of a layer drop the same token.
    heads_agree: ClassVar[bool] = False

    def prompt_scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> tuple[Float[Array, "B H N"], Float[Array, "B H N"]]:
        """(scores to select a prompt's tokens by, scores that decoding starts from), float32."""
        raise NotImplementedError

    def gains(self, cache: LayerCache, logits: Float[Array, "B P G R"], step: Step) -> Float[Array, "B P R"]:
        """The amount that this step's query adds to each slot's score, from its scaled logits by page."""
        raise NotImplementedError

    def rank(self, cache: LayerCache, logits: Float[Array, "B P G R"], step: Step) -> Float[Array, "B P R"]:
        """Scores to choose the leaving slot by, which become the mark "score" where there is one."""
        return cache.marks["score"] + jnp.where(step.active[:, None, None], self.gains(cache, logits, step), 0.0)

    def window_of(self, budget: Int[Array, " B"]) -> Int[Array, " B"]:
        """The number of recent tokens that are never evicted, for rows of these budgets."""
        return jnp.zeros_like(budget)

    def own_state(self, config: ModelConfig, layer: int, batch: int) -> Any:
        """The policy's own arrays in a cache that has seen nothing."""
        return None

    def own_after(self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> Any:
        """The policy's own arrays after a prompt."""
        return cache.state.own

    # --- prompts ----------------------------------------------------------------------------------------------

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        return self.prompt_scores(layer, cache, candidates, chunk)[0]

    def protected(self, candidates: Candidates, chunk: PromptChunk) -> Bool[Array, "B H N"]:
        return self._recent(candidates, self.size(chunk.config, 0, chunk.total))

    def _recent(self, candidates: Candidates, budget: Int[Array, " B"]) -> Bool[Array, "B H N"]:
        """The candidates within the window of recent tokens."""
        last = candidates.length[..., None] - self.window_of(budget)[:, None, None]
        return candidates.valid & (jnp.arange(candidates.k.shape[2]) >= last)

    def marks_after(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> dict[str, Array]:
        return {"score": self.prompt_scores(layer, cache, candidates, chunk)[1]} if "score" in cache.marks else {}

    def state_after(self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> Any:
        return dataclasses.replace(cache.state, own=self.own_after(layer, cache, candidates, chunk))

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        # A short prompt's row fills up to its budget while decoding, and no row is longer than the context.
        sizes = [int(self.size(config, layer, np.asarray([prompt]))[0]) for layer in range(config.num_layers)]
        slots = [min(size, max(config.max_position, prompt)) + 1 for size in sizes]
        return tuple((count,) * config.num_kv_heads for count in slots)

    def init_state(self, config: ModelConfig, layer: int, batch: int, slots: tuple[int, ...]) -> Any:
        return EvictState(jnp.zeros((batch,), jnp.int32), self.own_state(config, layer, batch))

    def sort_slots(self, layer: int, cache: LayerCache, config: ModelConfig) -> LayerCache:
        """Drop the token that has left and put the others in order of position."""
        k, v = keys_and_values(cache)
        slot = jnp.arange(k.shape[2])
        live = (slot < cache.length[..., None]) & (slot != cache.next[..., None])
        order = jnp.argsort(jnp.where(live, mark_by_head(cache, "position"), _LAST), axis=-1)
        k, v = (jnp.take_along_axis(x, order[..., None], axis=2) for x in (k, v))
        marks = {name: jnp.take_along_axis(mark_by_head(cache, name), order, axis=2) for name in cache.marks}
        return store(cache, k, v, live.sum(axis=-1, dtype=jnp.int32), cache.pages, marks)

    def retained(self, cache: LayerCache) -> HostOrTraced:
        return cache.length - (cache.next < cache.length)

    def select(self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> Selection:
        # A row that reads nothing this time keeps its budget; 0 is that of a row that never read.
        before = cache.state.budget
        budget = jnp.where((chunk.count > 0) | (before == 0), self.size(chunk.config, layer, chunk.total), before)
        chosen_by, start = self.prompt_scores(layer, cache, candidates, chunk)
        valid, sure = candidates.valid, self._recent(candidates, budget)
        sure = sure | self.of_turn(candidates, chunk, budget, sure)
        free = budget[:, None] - sure.sum(axis=-1, dtype=jnp.int32)
        keep = sure | top_mask(chosen_by, jnp.maximum(free, 0), valid & ~sure)
        keep = jnp.where((candidates.length <= budget[:, None])[..., None], valid, keep)
        state = EvictState(budget, self.own_after(layer, cache, candidates, chunk))
        return selection(cache, candidates, keep, {"score": start} if "score" in cache.marks else None, state=state)

    # --- steps ------------------------------------------------------------------------------------------------

    def append(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H D"], v: Float[Array, "B H D"], step: Step
    ) -> LayerCache:
        return append_new(cache, k, v, step)  # its score starts at 0; ``next`` is chosen after attention

    def observe(self, layer: int, cache: LayerCache, logits: Float[Array, "B P G R"] | None, step: Step) -> LayerCache:
        assert logits is not None
        state: EvictState = cache.state
        score = self.rank(cache, logits, step)
        # The new token is in, and is the last of the recent ones.
        first_recent = step.position + 1 - self.window_of(state.of_equal_head)
        worst = lowest_slot(cache, score, cache.marks["position"] < first_recent[:, None, None])
        following = jnp.where(cache.length > state.of_heads, worst, cache.length)
        following = jnp.where(step.active[:, None], following, cache.next)
        marks = {**cache.marks, "score": score} if "score" in cache.marks else cache.marks
        return cache.replace(marks=marks, next=following)


def attention_weights(
    cache: LayerCache,
    logits: Float[Array, "B P G R"],
    gain: Float[Array, " B"] | None = None,
    sink_logits: Float[Array, "B H G"] | None = None,
) -> Float[Array, "B P G R"]:
    """A step's attention over the slots of each head, softmax(gain x logits); 0 where a slot holds nothing.

    ``sink_logits`` are logits of the same softmaxes that belong to no slot; what they take the slots' weights lack, as
    in the model's own attention.

    On a CPU written as :func:`kvjax.cache.attention.decode_attention` writes it, so that XLA computes the common part
    once; elsewhere so that nothing of the logits' size is made beside them.
    """
    if cache.row_starts is not None:
        return _weights_by_row(cache, logits, gain, sink_logits)
    if not cache.uniform:
        by = by_head(cache, logits)
        held = (jnp.arange(by.shape[-1]) < cache.length[..., None])[:, :, None]
        peak = jnp.where(held, by, -jnp.inf).max(axis=-1, keepdims=True)
        factor = 1 if gain is None else gain[:, None, None, None]
        peak, sink = _with_sinks(peak, None if sink_logits is None else sink_logits[..., None], factor)
        weight = jnp.where(held, jnp.exp((by - peak) * factor), 0.0)
        return by_page(cache, weight / (weight.sum(axis=-1, keepdims=True) + sink))
    by = logits.reshape(logits.shape[0], len(cache.pages), cache.pages[0], *logits.shape[2:])
    factor = 1 if gain is None else gain[:, None, None, None, None]
    own = None if sink_logits is None else sink_logits[:, :, None, :, None]
    peak, sink = _with_sinks(by.max(axis=(2, 4), keepdims=True), own, factor)
    by = by - peak if gain is None else (by - peak) * factor
    weight = jnp.exp(by)
    mass = weight.sum(axis=(2, 4))[:, :, None, :, None] + sink
    # A quotient would have XLA keep the exponentials for it.
    weight = weight / mass if cache.layout.kind == "columns" else jnp.exp(by - jnp.log(mass))
    return weight.reshape(logits.shape)


def _weights_by_row(
    cache: LayerCache, logits: Float[Array, "B P G R"], gain: Float[Array, " B"] | None, sink_logits: Array | None
) -> Float[Array, "B P G R"]:
    """:func:`attention_weights` where each row has its own runs: slots stay where they are, and pages find their heads.

    Brought to its head, a row's part would be as long as the longest run there may be, once for every head.
    """
    owner, slot = _slots_by_row(cache)
    heads, held = len(cache.pages), (slot < runs.of_owner(cache.length, owner)[..., None])[:, :, None]
    factor = 1 if gain is None else gain[:, None, None, None]
    peak = runs.reduced(jnp.where(held, logits, -jnp.inf).max(axis=3), owner, heads, jnp.max, -jnp.inf)
    peak, sink = _with_sinks(peak, sink_logits, 1 if gain is None else gain[:, None, None])
    weight = jnp.where(held, jnp.exp((logits - runs.of_owner(peak, owner)[..., None]) * factor), 0.0)
    mass = runs.reduced(weight.sum(axis=3), owner, heads, jnp.sum, 0.0) + sink
    return weight / runs.of_owner(mass, owner)[..., None]


def _slots_by_row(cache: LayerCache) -> tuple[Int[Array, "B P"], Int[Array, "B P R"]]:
    """The head of each page, and each slot's number in that head's run, where each row has its own runs."""
    assert cache.row_starts is not None
    owner, nth = runs.owners(cache.row_starts, sum(cache.pages))
    return owner, nth[..., None] * cache.page_size + jnp.arange(cache.page_size, dtype=jnp.int32)


def _with_sinks(peak: Array, sink_logits: Array | None, factor: Array | int) -> tuple[Array, Array | int]:
    """The largest logit of each softmax, its sink logit included, and what this adds to the sum of its exponentials."""
    if sink_logits is None:
        return peak, 0
    peak = jnp.maximum(peak, sink_logits)
    return peak, jnp.exp((sink_logits - peak) * factor)


def lowest_slot(cache: LayerCache, score: Float[Array, "B P R"], among: Bool[Array, "B P R"]) -> Int[Array, "B H"]:
    """The held slot of each head with the lowest score among the allowed, of equals the earliest position.

    Three reductions, for a CPU each first over pages and then over what that leaves: its code for a reduction over the
    last axis is scalar (measured at 8 x 3 heads of 544 slots: ``argmin`` 88 us, these 8 us). A GPU would bring what it
    reduces over pages into another order first, a copy.
    """
    if cache.row_starts is not None:
        return _lowest_by_row(cache, score, among)
    shape = (score.shape[0], len(cache.pages), -1, score.shape[2])
    position, slots = cache.marks["position"], np.arange(max(cache.slots)).reshape(-1, score.shape[2])
    if cache.uniform:
        score, among, position = (x.reshape(shape) for x in (score, among, position))
    else:
        score, among, position = (by_head(cache, x).reshape(shape) for x in (score, among, position))
    slot = jnp.asarray(slots, jnp.int32)

    def reduce(x: Array, largest: bool = False) -> Array:
        over = jnp.max if largest else jnp.min
        if cache.layout.kind != "columns":
            return over(x, axis=(2, 3))
        return over(jax.lax.optimization_barrier(over(x, axis=2)), axis=2)

    ranked = jnp.where(among & (slot < cache.length[..., None, None]), score, jnp.inf)
    worst = ranked == reduce(ranked)[..., None, None]
    earliest = reduce(jnp.where(worst, position, _LAST))[..., None, None]
    return reduce(jnp.where(worst & (position == earliest), slot, 0), largest=True)


def _lowest_by_row(cache: LayerCache, score: Float[Array, "B P R"], among: Bool[Array, "B P R"]) -> Int[Array, "B H"]:
    """:func:`lowest_slot` where each row has its own runs."""
    owner, slot = _slots_by_row(cache)
    heads, position = len(cache.pages), cache.marks["position"]
    held = slot < runs.of_owner(cache.length, owner)[..., None]

    def least(x: Array, empty: float) -> Array:
        found = runs.reduced(x.min(axis=2), owner, heads, jnp.min, empty)
        return runs.of_owner(found, owner)[..., None]

    ranked = jnp.where(among & held, score, jnp.inf)
    worst = held & (ranked == least(ranked, jnp.inf))
    earliest = least(jnp.where(worst, position, _LAST), _LAST)
    found = jnp.where(worst & (position == earliest), slot, 0).max(axis=2)
    return runs.reduced(found, owner, heads, jnp.max, 0)
