"""StreamingLLM: attention sinks and a ring of recent tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.packing import store
from kvjax.cache.pool import LayerCache, write, write_mark
from kvjax.checks import MOST_SLOTS, number, whole_number
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.model.rope import angles, rotate
from kvjax.policies.base import (
    HostOrTraced,
    Policy,
    PromptChunk,
    Step,
    append_new,
    floor_fraction,
    numpy_or_jax,
    per_head,
)
from kvjax.policies.option_checks import one_of, only_one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RingState:
    """Counters of one layer's ring.

    Attributes:
      budget: [B] slots of each row, sinks included; fixed when the row's first prompt is in.
      count: [B] tokens the ring has been offered, sinks included.
      sink_k: [B, H, sink, D] the sinks' keys after rotary embedding, for ``positions="cache"`` of a model with rotary
        embedding; None otherwise.
    """

    budget: Int[Array, " B"]
    count: Int[Array, " B"]
    sink_k: Float[Array, "B H S D"] | None


@dataclasses.dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keep the first `sink` tokens and a ring of the most recent ones (Xiao et al., arXiv 2309.17453).

    Exactly one of ``window`` (recent tokens), ``budget`` (sinks and window together, tokens) and ``ratio`` (that
    budget as a fraction of the row's prompt) sets the size; with none of them the window is 1,020 tokens.

    ``positions="original"`` leaves keys at the positions they were computed at. ``positions="cache"`` is the paper's:
    tokens are renumbered by their place in the cache, so a conversation may run past the model's context. Distances
    within the ring do not change when it is renumbered, so only the sinks' keys rotate: by the number of tokens that
    have left the cache, each time from their first rotation, which never accumulates rounding. Angles are float32
    products of position and frequency, as everywhere: at a million tokens the fastest channels are off by 0.06 rad.
    With ALiBi only the sinks' marked positions move, by as much: the bias grows evenly over the cache, without a jump.

    The prompt itself is read whole, with every token at its position, then cut to the budget. A ring keeps its size on
    later turns. Slots are in ring order, not position order, once tokens have left.
    """

    layers_alike: ClassVar[bool] = True

    sink: int = 4
    window: int | None = None
    budget: int | None = None
    ratio: float | None = None
    positions: Literal["original", "cache"] = "original"

    grows: ClassVar[bool] = False
    replans: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole_number("sink", self.sink, 0, MOST_SLOTS)
        only_one("StreamingLLM", window=self.window, budget=self.budget, ratio=self.ratio)
        if self.window is not None:
            whole_number("window", self.window, 1, MOST_SLOTS)
        if self.budget is not None:
            whole_number("budget", self.budget, 1, MOST_SLOTS)
        if self.budget is not None and self.budget < self.sink + 1:
            raise UsageError(
                f"A budget of {self.budget} tokens is smaller than {self.sink} sinks and a window of 1; "
                f"give at least {self.sink + 1}."
            )
        if self.ratio is not None:
            number("ratio", self.ratio, 0, 1, open_below=True)
        one_of("positions", self.positions, ("original", "cache"))

    def check(self, config: ModelConfig) -> None:
        if self.positions == "cache" and config.positional == "rope" and config.rope.kind in ("dynamic", "longrope"):
            raise UsageError(
                f'positions="cache" needs fixed rotary frequencies, and this model\'s "{config.rope.kind}" scaling '
                'changes them with the length; use positions="original".'
            )

    @property
    def beyond_context(self) -> bool:
        return self.positions == "cache"

    def _budget(self, total: HostOrTraced) -> Any:
        """Slots of rows whose first prompt has ``total`` tokens, sinks included; works on numbers and on arrays."""
        xp = numpy_or_jax(total)
        if self.ratio is not None:
            return xp.maximum(floor_fraction(self.ratio, total), self.sink + 1)
        size = self.budget if self.budget is not None else self.sink + (self.window or 1020)
        return xp.full(xp.shape(total), size, xp.int32)

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        size = int(self._budget(np.asarray(prompt)))
        return ((size,) * config.num_kv_heads,) * config.num_layers

    def budgets(self, config: ModelConfig, layer: int, total: HostOrTraced) -> HostOrTraced:
        xp = numpy_or_jax(total)
        kept = xp.minimum(total, self._budget(total))
        return per_head(kept, config)

    def init_state(self, config: ModelConfig, layer: int, batch: int, slots: tuple[int, ...]) -> Any:
        sinks = None
        if self.positions == "cache" and config.positional == "rope":
            sinks = jnp.zeros((batch, config.num_kv_heads, self.sink, config.head_dim), jnp.float32)
        # A budget of 0 marks a row that has not read a prompt yet.
        return RingState(jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), jnp.int32), sinks)

    def _slot(self, count: Array, budget: Array) -> Array:
        """Slot of the row's ``count``-th token (from 0) in a cache of ``budget`` slots."""
        ring = jnp.maximum(budget - self.sink, 1)
        return jnp.where(count < self.sink, count, self.sink + (count - self.sink) % ring)

    def compress(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H T D"], v: Float[Array, "B H T D"], chunk: PromptChunk
    ) -> LayerCache:
        state: RingState = cache.state
        slots = max(chunk.pages) * cache.page_size
        budget = jnp.where(state.budget == 0, jnp.minimum(self._budget(chunk.total), slots), state.budget)
        count = state.count + chunk.count
        slot = jnp.arange(slots)[None]
        # The newest token that belongs in each slot, by its number in the row; older numbers were there before.
        ring = jnp.maximum(budget - self.sink, 1)[:, None]
        newest = count[:, None] - 1 - (count[:, None] - 1 - slot) % ring
        number = jnp.where(slot < self.sink, slot, newest)
        from_new = (number >= state.count[:, None]) & (number < count[:, None]) & (number >= 0)
        source = jnp.clip(number - state.count[:, None], 0, k.shape[2] - 1)[:, None, :, None]
        new_k, new_v = jnp.take_along_axis(k, source, axis=2), jnp.take_along_axis(v, source, axis=2)
        length = jnp.broadcast_to(jnp.minimum(count, budget)[:, None], cache.length.shape)
        following = jnp.broadcast_to(self._slot(count, budget)[:, None], cache.length.shape)
        marks = {"position": jnp.broadcast_to(jnp.maximum(number, 0)[:, None], new_k.shape[:3])}
        if chunk.fresh:
            cache = store(cache, new_k, new_v, length, chunk.pages, marks)
        else:
            target = jnp.broadcast_to(slot[:, None], new_k.shape[:3])
            # The ring keeps its allocation; a slot beyond it can only belong to a longer bucket's padding.
            valid = jnp.broadcast_to((from_new & (slot < budget[:, None]))[:, None], new_k.shape[:3])
            cache = write(cache, new_k, new_v, target, valid, marks).replace(length=length)
        cache = cache.replace(next=following)
        sink_k = state.sink_k
        if sink_k is not None:
            fresh_sinks = from_new[:, : self.sink][:, None, :, None]
            sink_k = jnp.where(fresh_sinks, new_k[:, :, : self.sink].astype(jnp.float32), sink_k)
        cache = cache.replace(state=RingState(budget, count, sink_k))
        return self._renumber_sinks(cache, chunk.config)

    def append(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H D"], v: Float[Array, "B H D"], step: Step
    ) -> LayerCache:
        state: RingState = cache.state
        filling = state.count < self.sink
        cache = append_new(cache, k, v, step)
        sink_k = state.sink_k
        if sink_k is not None and self.sink:
            # A prompt shorter than the sinks: the tokens that follow become sinks.
            here = (jnp.arange(self.sink) == state.count[:, None]) & (filling & step.active)[:, None]
            sink_k = jnp.where(here[:, None, :, None], k[:, :, None].astype(jnp.float32), sink_k)
        count = state.count + step.active
        following = jnp.broadcast_to(self._slot(count, state.budget)[:, None], cache.next.shape)
        cache = cache.replace(next=following, state=RingState(state.budget, count, sink_k))
        return self._renumber_sinks(cache, step.config)

    def _renumber_sinks(self, cache: LayerCache, config: ModelConfig) -> LayerCache:
        """Move the sinks by the number of tokens that left the cache, so that they sit next to the ring."""
        state: RingState = cache.state
        if self.positions != "cache" or self.sink == 0 or config.positional == "none":
            return cache
        gone = jnp.maximum(state.count - state.budget, 0)
        if state.sink_k is None:
            slots = jnp.broadcast_to(jnp.arange(self.sink), (*cache.length.shape, self.sink))
            moved = slots + gone[:, None, None]
            return write_mark(cache, "position", moved, slots, (gone > 0)[:, None, None])
        cos, sin = angles(dataclasses.replace(config, rope=_unscaled(config)), gone[:, None], gone)
        after_rope = rotate(state.sink_k, cos[:, None], sin[:, None])
        slots = jnp.broadcast_to(jnp.arange(self.sink), after_rope.shape[:3])
        valid = jnp.broadcast_to((gone > 0)[:, None, None], after_rope.shape[:3])
        return write(cache, after_rope, None, slots, valid)


def _unscaled(config: ModelConfig) -> Any:
    """The model's frequencies without yarn's temperature: applied twice to a key, it would scale twice."""
    if config.rope.kind == "yarn":
        return dataclasses.replace(config.rope, attention_factor=1.0)
    return config.rope
