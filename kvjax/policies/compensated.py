"""The cache of heads that are no retrieval heads in RazorAttention: sinks, recent tokens, and a compensation token."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.packing import store
from kvjax.cache.pool import LayerCache, keys_and_values, read_slots, write
from kvjax.checks import MOST_SLOTS, number, true_or_false, whole_number
from kvjax.errors import UsageError, quoted
from kvjax.model.config import ModelConfig
from kvjax.policies.base import HostOrTraced, Policy, PromptChunk, Step, append_new, floor_fraction, numpy_or_jax
from kvjax.policies.option_checks import only_one, refuse_unused

#: Added to the logit of a compensation token that stands for nothing: its weight is exactly 0, and nothing overflows.
NOTHING = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RingState:
    """One layer's rings and what has left them.

    A row's tokens are numbered from 0 by position. Token n stands in slot n of the sinks, or in slot
    ``(n - start) mod buffer`` of the ring; all from the sinks to the ring's oldest token have been merged.

    Attributes:
      start: [B, H] the token in the ring's first slot when the row's last prompt was in.
      buffer: [B, H] slots of each head's ring; 0 before the first prompt.
      mean_k, mean_v: [B, H, D] float32 means of the merged keys and values; None without compensation.
    """

    start: Int[Array, "B H"]
    buffer: Int[Array, "B H"]
    mean_k: Float[Array, "B H D"] | None
    mean_v: Float[Array, "B H D"] | None

    def oldest(self, count: Int[Array, " B"]) -> Int[Array, "B H"]:
        """The oldest token in each ring after ``count`` tokens of the row."""
        return jnp.maximum(self.start, count[:, None] - self.buffer)


@dataclasses.dataclass(frozen=True)
class CompensatedRing(Policy):
    """Keep sinks, recent tokens, and the mean of all between as one weighted token (RazorAttention, arXiv 2407.15891).

    The first ``sink`` tokens and the last ``buffer`` stay. What leaves the buffer is merged into a compensation token:
    the mean of the dropped keys (after rotary) and of the dropped values [4], whose softmax term is weighted by their
    number N_d [5]: log N_d is added to its logit. The means are float32 whatever the cache's dtype, and are written
    to slot 0 at each step; the buffer is a ring, so a decode step reads one leaving token and writes two rows.

    Size, one of: ``budget`` tokens a head; ``ratio`` of the tokens a row has seen; otherwise the paper's buffer
    max(``threshold``, N / ``compression``) (S0 and C of algorithm 1) beside the sinks, N the tokens seen. It is
    computed anew at each prompt and later turn and never shrinks; a dropped token never returns, so a buffer that
    became longer fills with what follows. ``budget`` and ``ratio`` count sinks and compensation token as tokens kept; a
    prompt that fits loses nothing, since a token that is compensated for alone is its own mean.

    ``lengths`` gives every head [layer][KV head] a buffer of its own instead (attention scopes of ALiBi models).
    ``compensation=False`` drops what leaves.

    Slots: the compensation token, the sinks, the ring. Slots are in ring order, not position order, while decoding.
    """

    layers_alike: ClassVar[bool] = True

    sink: int = 4
    threshold: int = 4000
    compression: float = 5.0
    budget: int | None = None
    ratio: float | None = None
    compensation: bool = True
    lengths: tuple[tuple[int, ...], ...] | None = None

    grows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        only_one("CompensatedRing", budget=self.budget, ratio=self.ratio, lengths=self.lengths)
        whole_number("sink", self.sink, 0, MOST_SLOTS)
        whole_number("threshold", self.threshold, 1, MOST_SLOTS)
        number("compression", self.compression, 1)
        if self.budget is not None:
            whole_number("budget", self.budget, self.smallest(), MOST_SLOTS)
        if self.ratio is not None:
            number("ratio", self.ratio, 0, 1, open_below=True)
        true_or_false("compensation", self.compensation)
        table = () if self.lengths is None else self.lengths
        if not isinstance(table, tuple) or not all(isinstance(heads, tuple) for heads in table):
            raise UsageError(f"lengths is {quoted(self.lengths)}; give a tuple of a layer's KV heads for each layer.")
        for length in (length for heads in table for length in heads):
            whole_number("every length", length, 1, MOST_SLOTS)

    @property
    def merges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether slot 0 stands for many tokens."""
        return self.compensation

    @property
    def heads_alike(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether no head has a buffer of its own."""
        return self.lengths is None

    @property
    def first(self) -> int:
        """Slot of the first sink."""
        return int(self.compensation)

    def smallest(self) -> int:
        """The least a head can keep: the compensation token, the sinks and one recent token."""
        return self.first + self.sink + 1

    def check(self, config: ModelConfig) -> None:
        if self.compensation and config.positional == "alibi":
            raise UsageError("A compensation token has no position, which ALiBi's bias needs; give compensation=False.")
        if self.budget is not None or self.ratio is not None or self.lengths is not None:
            sizes = ("threshold", "compression")
            refuse_unused(
                self, sizes, "budget, ratio and lengths size the buffer in place of threshold and compression"
            )
        heads = [] if self.lengths is None else [len(row) for row in self.lengths]
        if heads and heads != [config.num_kv_heads] * config.num_layers:
            raise UsageError(f"lengths must give {config.num_layers} layers of {config.num_kv_heads} heads.")

    def layer_kind(self, config: ModelConfig, layer: int) -> Hashable | None:
        kind = super().layer_kind(config, layer)
        return kind if kind is None or self.lengths is None else self.lengths[layer]

    # --- how many ---------------------------------------------------------------------------------------------

    def _buffer(self, config: ModelConfig, layer: int, total: HostOrTraced) -> Any:
        """[B, H] recent tokens that heads of rows of ``total`` tokens hold beside the sinks."""
        xp = numpy_or_jax(total)
        size = xp.maximum(self._slots(layer, total) - self.first - self.sink, 1)
        return xp.broadcast_to(size, (len(total), config.num_kv_heads)).astype(xp.int32)

    def _slots(self, layer: int, total: HostOrTraced) -> Any:
        """[B, 1 or H] slots of rows of ``total`` tokens, the compensation token's included."""
        xp = numpy_or_jax(total)
        if self.budget is not None:
            return xp.full((len(total), 1), self.budget, xp.int32)
        if self.ratio is not None:
            return floor_fraction(self.ratio, total)[:, None]
        if self.lengths is not None:
            recent = xp.asarray(self.lengths[layer], xp.int32)[None]
        else:
            recent = xp.maximum(self.threshold, floor_fraction(1 / self.compression, total))[:, None]
        return self.first + self.sink + recent

    def budgets(self, config: ModelConfig, layer: int, total: HostOrTraced) -> HostOrTraced:
        xp = numpy_or_jax(total)
        held, tokens = self.sink + self._buffer(config, layer, total), total[:, None]
        return xp.where(tokens <= held, tokens, held + self.first).astype(xp.int32)

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        # No row is ever longer than the context, whatever its ring could hold.
        return self.grown_capacities(config, prompt, max(config.max_position - prompt, 0))

    def grown_capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        """The same for pools that are repacked when ``new`` tokens were decoded: no slots before there are tokens."""
        slots = []
        for layer in range(config.num_layers):
            most = np.maximum(self._slots(layer, np.asarray([prompt])), self.smallest())
            most = np.broadcast_to(most, (1, config.num_kv_heads))[0]
            slots.append(tuple(min(int(count), self.first + prompt + new) for count in most))
        return tuple(slots)

    # --- prompts ----------------------------------------------------------------------------------------------

    def init_state(self, config: ModelConfig, layer: int, batch: int, slots: tuple[int, ...]) -> Any:
        start = jnp.full((batch, config.num_kv_heads), self.sink, jnp.int32)
        mean = jnp.zeros((*start.shape, config.head_dim), jnp.float32) if self.compensation else None
        return RingState(start, jnp.zeros_like(start), mean, mean)

    def compress(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H T D"], v: Float[Array, "B H T D"], chunk: PromptChunk
    ) -> LayerCache:
        state: RingState = cache.state
        before, count = chunk.seen, chunk.seen + chunk.count
        size = jnp.maximum(state.buffer, self._buffer(chunk.config, layer, chunk.total))
        # A row that reads nothing this time stays as it is.
        buffer = jnp.where(chunk.count[:, None] > 0, size, state.buffer)
        oldest = jnp.maximum(state.oldest(before), count[:, None] - buffer)
        after = dataclasses.replace(state, start=oldest, buffer=buffer)
        tokens = self._laid_out(oldest, max(chunk.pages) * cache.page_size)
        if chunk.fresh:
            all_k, all_v, source = k, v, tokens
            old_number = jnp.zeros((*oldest.shape, 0), jnp.int32)
        else:
            old_k, old_v = keys_and_values(cache)
            old_number = self._token_of(state, before, old_k.shape[2])
            all_k, all_v = (
                jnp.concatenate([old.astype(jnp.promote_types(old.dtype, new.dtype)), new], axis=2)
                for old, new in ((old_k, k), (old_v, v))
            )
            new_place = old_k.shape[2] + tokens - before[:, None, None]
            source = jnp.where(tokens < before[:, None, None], self._slot(state, tokens), new_place)
        if self.compensation:
            # Every candidate's token; padding comes after all tokens, so it is never among those that leave.
            new_number = jnp.broadcast_to((before[:, None] + jnp.arange(k.shape[2]))[:, None], k.shape[:3])
            number = jnp.concatenate([old_number, new_number], axis=2)
            leaving = (number >= state.oldest(before)[..., None]) & (number < oldest[..., None])
            after = self._merged(after, all_k, all_v, leaving, oldest - self.sink)
        source = jnp.clip(source, 0, all_k.shape[2] - 1)[..., None]
        new_k, new_v = (jnp.take_along_axis(x, source, axis=2) for x in (all_k, all_v))
        if after.mean_k is not None and after.mean_v is not None:
            new_k, new_v = (
                jnp.concatenate([mean[:, :, None].astype(x.dtype), x[:, :, 1:]], axis=2)
                for mean, x in ((after.mean_k, new_k), (after.mean_v, new_v))
            )
        held = jnp.minimum(count, self.sink)[:, None] + jnp.maximum(count[:, None] - oldest, 0)
        cache = store(cache, new_k, new_v, self.first + held, chunk.pages, {"position": jnp.maximum(tokens, 0)})
        following = self._slot(after, jnp.broadcast_to(count[:, None, None], (*oldest.shape, 1)))[..., 0]
        return cache.replace(next=following, state=after, log_mass=self._log_mass(after, count))

    def _laid_out(self, oldest: Int[Array, "B H"], slots: int) -> Int[Array, "B H N"]:
        """The token in each slot right after a prompt: sinks, then the ring from its oldest token on."""
        place = jnp.arange(slots) - self.first
        return jnp.where(place < self.sink, place, place - self.sink + oldest[..., None])

    def _slot(self, state: RingState, token: Int[Array, "B H N"]) -> Int[Array, "B H N"]:
        """The slot a token stands in, or will stand in."""
        ring = (token - state.start[..., None]) % jnp.maximum(state.buffer, 1)[..., None]
        return self.first + jnp.where(token < self.sink, token, self.sink + ring)

    def _token_of(self, state: RingState, count: Int[Array, " B"], slots: int) -> Int[Array, "B H N"]:
        """The token in each slot of the ring after ``count`` tokens of the row; -1 elsewhere."""
        place = jnp.arange(slots) - self.first - self.sink
        last = (count - 1)[:, None, None]
        back = (last - state.start[..., None] - place) % jnp.maximum(state.buffer, 1)[..., None]
        inside = (place >= 0) & (place < state.buffer[..., None]) & (last - back >= state.start[..., None])
        return jnp.where(inside, last - back, -1)

    def _merged(
        self,
        state: RingState,
        k: Float[Array, "B H N D"],
        v: Float[Array, "B H N D"],
        leaving: Bool[Array, "B H N"],
        merged: Int[Array, "B H"],
    ) -> RingState:
        """The means with the leaving rows in, ``merged`` tokens in all [4]."""
        share_of_one = (1.0 / jnp.maximum(merged, 1))[..., None]

        def updated(mean: Array | None, x: Array) -> Array:
            assert mean is not None
            away = jnp.where(leaving[..., None], x.astype(jnp.float32) - mean[:, :, None], 0.0)
            return mean + away.sum(axis=2) * share_of_one

        return dataclasses.replace(state, mean_k=updated(state.mean_k, k), mean_v=updated(state.mean_v, v))

    def _log_mass(self, state: RingState, count: Int[Array, " B"]) -> Float[Array, "B H"] | None:
        if not self.compensation:
            return None
        merged = state.oldest(count) - self.sink
        return jnp.where(merged > 0, jnp.log(jnp.maximum(merged, 1).astype(jnp.float32)), NOTHING)

    def retained(self, cache: LayerCache) -> HostOrTraced:
        return cache.length if cache.log_mass is None else cache.length - (cache.log_mass == NOTHING)

    # --- steps ------------------------------------------------------------------------------------------------

    def append(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H D"], v: Float[Array, "B H D"], step: Step
    ) -> LayerCache:
        state: RingState = cache.state
        count = step.position + step.active
        if state.mean_k is None or state.mean_v is None:
            cache = append_new(cache, k, v, step)
        else:
            leaving = state.oldest(count) > state.oldest(step.position)
            left_k, left_v = read_slots(cache, cache.next)
            weight = 1.0 / jnp.maximum(state.oldest(count) - self.sink, 1)
            weight = jnp.where(leaving & step.active[:, None], weight, 0.0)[..., None]
            mean_k = state.mean_k + weight * (left_k - state.mean_k)
            mean_v = state.mean_v + weight * (left_v - state.mean_v)
            state = dataclasses.replace(state, mean_k=mean_k, mean_v=mean_v)
            cache = self._write_both(cache, mean_k, mean_v, k, v, step)
        following = self._slot(state, jnp.broadcast_to(count[:, None, None], (*cache.next.shape, 1)))[..., 0]
        return cache.replace(next=following, state=state, log_mass=self._log_mass(state, count))

    def _write_both(
        self, cache: LayerCache, mean_k: Array, mean_v: Array, k: Array, v: Array, step: Step
    ) -> LayerCache:
        """The compensation token and the new one, in one write: it depends on the row that was read, so XLA knows that
        the read comes first. With a write each it copied every pool at every step.
        """
        slots = jnp.stack([jnp.zeros_like(cache.next), cache.next], axis=2)
        both_k, both_v = (
            jnp.stack([mean, new.astype(jnp.float32)], axis=2) for mean, new in ((mean_k, k), (mean_v, v))
        )
        position = jnp.where(slots == 0, 0, step.position[:, None, None])
        cache = write(cache, both_k, both_v, slots, step.active[:, None, None], {"position": position})
        longer = jnp.where(step.active[:, None], jnp.maximum(cache.length, cache.next + 1), cache.length)
        return cache.replace(length=longer)
