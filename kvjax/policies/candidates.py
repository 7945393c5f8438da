"""Selection of tokens: candidates in, a mask out, and a pool of the tokens that stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.packing import store
from kvjax.cache.pool import LayerCache, keys_and_values, mark_by_head
from kvjax.model.config import ModelConfig
from kvjax.policies.signals import CandidateSignals, Mass, PromptSignals


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptChunk:
    """New tokens for each row of a batch: a prompt, a chunk of a long prompt, or the prompt of a later turn.

    Attributes:
      seen: [B] tokens of each row before these.
      count: [B] how many of the new tokens belong to the row; the rest is padding on the right.
      total: [B] tokens the row will have seen when its whole prompt is in: what a ratio is a ratio of.
      pages: pages of each head of this layer after compression, static.
      config: the model, static.
      fresh: whether the cache is known to be empty, static.
      signals: what attention handed over of these tokens, or None when the policy declares nothing.
    """

    seen: Int[Array, " B"]
    count: Int[Array, " B"]
    total: Int[Array, " B"]
    pages: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    fresh: bool = dataclasses.field(metadata={"static": True})
    signals: PromptSignals | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Candidates:
    """The tokens a selection chooses from: for each head its kept slots, then the new tokens, without gaps.

    Attributes:
      k, v: [B, H, N, D] keys and values; at and beyond ``length`` they are finite garbage.
      length: [B, H] valid candidates.
      kept: [B, H] how many of them were in the cache before.
      marks: [B, H, N] by name; of new tokens "position" is filled in and the others are 0.
      signals: what attention handed over, in the candidates' order.
    """

    k: Float[Array, "B H N D"]
    v: Float[Array, "B H N D"]
    length: Int[Array, "B H"]
    kept: Int[Array, "B H"]
    marks: dict[str, Array] = dataclasses.field(default_factory=dict)
    signals: CandidateSignals = dataclasses.field(default_factory=CandidateSignals)

    @property
    def valid(self) -> Bool[Array, "B H N"]:
        """True for candidates, False beyond ``length``."""
        return jnp.arange(self.k.shape[2]) < self.length[..., None]

    @property
    def fresh_rows(self) -> Bool[Array, "B H N"]:
        """True for the new tokens."""
        return self.valid & (jnp.arange(self.k.shape[2]) >= self.kept[..., None])


@dataclasses.dataclass(frozen=True)
class Selection:
    """A policy's choice among candidates.

    Attributes:
      keep: [B, H, N], False beyond the candidates' length.
      marks: [B, H, N] by name, of the candidates.
      state: the layer's state afterwards.
      v: [B, H, N, D] the candidates' values where the choice changes those that stay, else None.
      unranked: [B, H] heads some of whose candidates had scores that are no numbers, or None where nothing was scored;
        kvjax refuses them.
    """

    keep: Bool[Array, "B H N"]
    marks: dict[str, Array]
    state: Any
    v: Float[Array, "B H N D"] | None = None
    unranked: Bool[Array, "B H"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighed:
    """A layer's candidates before the heads of several layers choose among them.

    Attributes:
      scores: [B, H, N] what each is worth. sure: those that stay whatever they score. valid: those there are.
      budget: [B] tokens that the layer's heads would have together.
      marks, state: as of a :class:`Selection`.
    """

    scores: Float[Array, "B H N"]
    sure: Bool[Array, "B H N"]
    valid: Bool[Array, "B H N"]
    budget: Int[Array, " B"]
    marks: dict[str, Array]
    state: Any


def selection(
    cache: LayerCache,
    candidates: Candidates,
    keep: Bool[Array, "B H N"],
    marks: Mapping[str, Array] | None = None,
    **changes: Any,
) -> Selection:
    """A choice that leaves the state and the other marks as they are."""
    return Selection(keep, {**candidates.marks, **(marks or {})}, changes.get("state", cache.state))


def gather_candidates(
    cache: LayerCache, k: Float[Array, "B H T D"], v: Float[Array, "B H T D"], chunk: PromptChunk
) -> Candidates:
    """Put a layer's kept slots and its new tokens one after the other, for each head."""
    count = jnp.broadcast_to(chunk.count[:, None], cache.length.shape)
    shape = k.shape[:3]
    new_marks = {name: jnp.zeros(shape, mark.dtype) for name, mark in cache.marks.items()}
    if "position" in new_marks:
        new_marks["position"] = jnp.broadcast_to((chunk.seen[:, None] + jnp.arange(shape[2]))[:, None], shape)
    given = chunk.signals or PromptSignals()
    if chunk.fresh:
        signals = CandidateSignals(
            None if given.window is None else given.window.new,
            None if given.columns is None else given.columns.new,
            given.queries,
            None if given.noncausal is None else given.noncausal.new,
            None if given.repeat is None else given.repeat.new,
            None if given.outputs is None else given.outputs.new,
            None if given.hidden is None else given.hidden.new,
        )
        return Candidates(k, v, count, jnp.zeros_like(count), new_marks, signals)
    old_k, old_v = keys_and_values(cache)
    capacity, tokens = old_k.shape[2], k.shape[2]
    order = jnp.arange(capacity + tokens)
    # Candidate j: slot j while j < length, then new token j - length.
    source = jnp.where(order < cache.length[..., None], order, capacity + order - cache.length[..., None])
    source = jnp.minimum(source, capacity + tokens - 1)

    def join(old: Array, new: Array, axis: int) -> Array:
        dtype = jnp.promote_types(old.dtype, new.dtype)
        both = jnp.concatenate([old.astype(dtype), new.astype(dtype)], axis=axis)
        index = jnp.expand_dims(source, tuple(i for i in range(both.ndim) if i not in (0, 1, axis)))
        return jnp.take_along_axis(both, index, axis=axis)

    def join_mass(mass: Mass | None) -> Array | None:
        if mass is None:
            return None
        # A layer's longest head may be longer than this group's: its slots end earlier.
        kept = jnp.zeros_like(mass.new) if mass.kept is None else mass.kept
        kept = jnp.pad(kept, ((0, 0),) * 3 + ((0, max(capacity - kept.shape[3], 0)),))[..., :capacity]
        return join(kept, mass.new, 3)

    return Candidates(
        join(old_k, k, 2),
        join(old_v, v, 2),
        cache.length + count,
        cache.length,
        {name: join(mark_by_head(cache, name), new_marks[name], 2) for name in cache.marks},
        CandidateSignals(
            join_mass(given.window),
            join_mass(given.columns),
            given.queries,
            join_mass(given.noncausal),
            join_mass(given.repeat),
            join_mass(given.outputs),
            join_mass(given.hidden),
        ),
    )


def keep_all(cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> LayerCache:
    """Every candidate stays, in order."""
    return store(cache, candidates.k, candidates.v, candidates.length, chunk.pages, candidates.marks)


def most_kept(cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> int:
    """The most candidates that a head may keep: its slots in any row, and where rows divide them what there is."""
    slots = max(cache.replace(pages=chunk.pages).most_slots)
    return slots if cache.row_starts is None else min(slots, candidates.k.shape[2])


def places_of(keep: Bool[Array, "B H N"], slots: int) -> tuple[Int[Array, "B H S"], Int[Array, "B H"]]:
    """The candidates that are kept, in order, as many as ``slots``, and how many there are of each head."""
    rank = jnp.cumsum(keep, axis=-1)
    # Slot i takes the (i + 1)-th kept row: the first position whose running count reaches i + 1.
    flat = rank.reshape(-1, rank.shape[-1])
    wanted = jnp.arange(1, slots + 1)
    source = jax.vmap(lambda r: jnp.searchsorted(r, wanted))(flat).reshape(*rank.shape[:-1], slots)
    return jnp.minimum(source, keep.shape[-1] - 1), rank[..., -1].astype(jnp.int32)


def keep_where(cache: LayerCache, candidates: Candidates, keep: Bool[Array, "B H N"], chunk: PromptChunk) -> LayerCache:
    """The candidates marked ``keep`` stay, in order, with their marks; the mask must be False beyond their length."""
    slots = most_kept(cache, candidates, chunk)
    source, length = places_of(keep, slots)
    k, v = (jnp.take_along_axis(x, source[..., None], axis=2) for x in (candidates.k, candidates.v))
    marks = {name: jnp.take_along_axis(mark, source, axis=2) for name, mark in candidates.marks.items()}
    return store(cache, k, v, length, chunk.pages, marks)


def top_mask(
    scores: Float[Array, "B H N"],
    count: Int[Array, "B K"],
    among: Bool[Array, "B H N"],
) -> Bool[Array, "B H N"]:
    """The ``count`` (of each head, or [B, 1]) highest scores among the allowed candidates; all if there are fewer.

    Ties go to the later one. One sort, of the scores alone.
    """
    # The sort's order is the integers': a float's bits, negative ones reversed; -0 is 0 and NaN is lowest.
    clean = jnp.where(jnp.isnan(scores), -jnp.inf, scores.astype(jnp.float32)) + 0.0
    bits = jax.lax.bitcast_convert_type(clean, jnp.int32)
    key = jnp.where(bits < 0, jnp.int32(-(2**31)) - bits, bits)
    lowest = jnp.int32(-(2**31))
    key = jnp.where(among, key, lowest)
    count = jnp.minimum(jnp.broadcast_to(count, scores.shape[:2]), among.sum(axis=-1, dtype=jnp.int32))
    ordered = jax.lax.sort(key, dimension=-1)
    size = scores.shape[-1]
    last = jnp.take_along_axis(ordered, jnp.clip(size - count, 0, size - 1)[..., None], axis=-1)
    above = (key > last) & among
    level = (key == last) & among
    spare = count - above.sum(axis=-1, dtype=jnp.int32)
    from_end = jnp.cumsum(level[..., ::-1], axis=-1)[..., ::-1]
    return (above | (level & (from_end <= spare[..., None]))) & (count > 0)[..., None]
