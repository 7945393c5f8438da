"""What a policy is: which tokens stay, as pure functions of arrays. Read this before any policy, or to write one.

A policy is a frozen, hashable dataclass, a static argument of the compiled programs. The runtime calls it

* on the host, before anything is allocated: :meth:`Policy.check`, :meth:`Policy.capacities`;
* in the compiled prefill, once a layer with the layer's whole keys and values: :meth:`Policy.compress`;
* in the compiled decode step, once a layer: :meth:`Policy.append` before attention and :meth:`Policy.observe` after
  it, so that the new token takes part in attention before one leaves (a budget of B needs B + 1 slots);
* between steps, still inside the compiled loop, when :meth:`Policy.due` says so: :meth:`Policy.maintain`.

Capacities are static bounds for a bucket of lengths; budgets are traced and come from each row's own true length. The
state a policy needs beside the pool (scores, running means, counters) lives in ``LayerCache.state`` as a pytree whose
leaves all lead with the batch axis. A policy from elsewhere is one such class passed as ``policy=``; :func:`register`
gives it a name for the command line.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pool import LayerCache, append_token, pack, pages_for, rows
from kvjax.config import ModelConfig
from kvjax.errors import UsageError

#: Budgets are solved by one formula on the host, in NumPy, and in compiled programs.
HostOrTraced = np.ndarray | Array


@dataclasses.dataclass(frozen=True)
class Signals:
    """What attention must hand over; everything not declared is never computed.

    Attributes:
      decode_logits: :meth:`Policy.observe` gets the new query's scaled scores by page.
    """

    decode_logits: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Turn:
    """A prompt, a chunk of one, or a later turn, as the rows of a batch see it.

    Attributes:
      seen: [B] tokens of each row before these.
      count: [B] how many of the new tokens belong to the row; the rest is padding on the right.
      total: [B] tokens the row will have seen when its whole prompt is in: what a ratio is a ratio of.
      pages: pages of each head of this layer after compression, static.
      config: the model, static.
      fresh: whether the cache is known to be empty, static.
    """

    seen: Int[Array, " B"]
    count: Int[Array, " B"]
    total: Int[Array, " B"]
    pages: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    fresh: bool = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """One decode step.

    Attributes:
      position: [B] position of the new token (tokens seen before it).
      active: [B] rows still generating; the others must stay as they are, bit for bit.
      config: the model, static.
    """

    position: Int[Array, " B"]
    active: Bool[Array, " B"]
    config: ModelConfig = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base of every policy: grows by one slot a token and never drops any, unless a subclass says otherwise."""

    signals: ClassVar[Signals] = Signals()
    #: Whether decoding needs ever more slots, so that the pools are repacked into the next bucket now and then.
    grows: ClassVar[bool] = True
    #: Whether :meth:`due` and :meth:`maintain` are to be called.
    maintains: ClassVar[bool] = False
    #: Whether slot 0 may stand for many tokens (``LayerCache.log_mass`` is allocated).
    merges: ClassVar[bool] = False

    def check(self, config: ModelConfig) -> None:
        """Refuse a model this policy cannot run on, in one sentence (UsageError)."""

    @property
    def beyond_context(self) -> bool:
        """Whether a conversation may run past the model's context."""
        return False

    def chunks(self, config: ModelConfig) -> tuple[int, int] | None:
        """(first, rest) tokens per prefill chunk, or None to take prompts whole."""
        return None

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        """Slots [layer][KV head] that suffice for any row of at most ``prompt`` tokens and ``new`` decoded after it."""
        return ((prompt + new,) * config.num_kv_heads,) * config.num_layers

    def budgets(self, config: ModelConfig, layer: int, total: HostOrTraced) -> HostOrTraced:
        """Slots each head of a row holds right after a prompt of ``total`` tokens was compressed."""
        xp = numpy_or_jax(total)
        return xp.broadcast_to(total[:, None], (len(total), config.num_kv_heads)).astype(xp.int32)

    def init_state(self, config: ModelConfig, layer: int, batch: int, slots: tuple[int, ...]) -> Any:
        """The policy's own arrays of one layer, leaves leading with the batch axis; None when it needs none."""
        return None

    def compress(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H T D"], v: Float[Array, "B H T D"], turn: Turn
    ) -> LayerCache:
        """Select over the kept slots and the new tokens; the result holds ``turn.pages``. Here: keep all."""
        candidates = gather_candidates(cache, k, v, turn)
        return keep_all(cache, candidates, turn)

    def append(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H D"], v: Float[Array, "B H D"], step: Step
    ) -> LayerCache:
        """Write the new token of each active row, before attention."""
        cache = append_token(cache, k, v, step.active)
        return cache.replace(next=cache.length)

    def observe(self, layer: int, cache: LayerCache, logits: Float[Array, "B P G R"] | None, step: Step) -> LayerCache:
        """After attention: accumulate what the policy counts, and choose the slot written ``next``."""
        return cache

    def due(self, layers: tuple[LayerCache, ...], config: ModelConfig) -> Bool[Array, " B"]:
        """Rows that must be maintained before they may append again."""
        return jnp.zeros(layers[0].length.shape[0], bool)

    def maintain(
        self, layer: int, cache: LayerCache, config: ModelConfig, row: Int[Array, ""], seen: Int[Array, ""]
    ) -> LayerCache:
        """Compact one row that is due, in place; ``seen`` is its tokens. Afterwards it must not be due any more."""
        return cache


@dataclasses.dataclass(frozen=True)
class Candidates:
    """What a selection chooses from: kept slots, then new tokens, contiguous per head and in that order.

    Attributes:
      k, v: [B, H, N, D] rows; rows at and beyond ``length`` are finite garbage.
      length: [B, H] valid rows.
      kept: [B, H] how many of them were in the cache before.
    """

    k: Float[Array, "B H N D"]
    v: Float[Array, "B H N D"]
    length: Int[Array, "B H"]
    kept: Int[Array, "B H"]


def gather_candidates(
    cache: LayerCache, k: Float[Array, "B H T D"], v: Float[Array, "B H T D"], turn: Turn
) -> Candidates:
    """Bring a layer's kept slots and its new tokens into one run of rows per head."""
    count = jnp.broadcast_to(turn.count[:, None], cache.length.shape)
    if turn.fresh:
        return Candidates(k, v, count, jnp.zeros_like(count))
    old_k, old_v = rows(cache)
    capacity, tokens = old_k.shape[2], k.shape[2]
    order = jnp.arange(capacity + tokens)
    # Row j of the run: slot j while j < length, then new token j - length.
    source = jnp.where(order < cache.length[..., None], order, capacity + order - cache.length[..., None])
    source = jnp.minimum(source, capacity + tokens - 1)[..., None]
    both_k = jnp.concatenate([old_k.astype(k.dtype), k], axis=2)
    both_v = jnp.concatenate([old_v.astype(v.dtype), v], axis=2)
    return Candidates(
        jnp.take_along_axis(both_k, source, axis=2),
        jnp.take_along_axis(both_v, source, axis=2),
        cache.length + count,
        cache.length,
    )


def keep_all(cache: LayerCache, candidates: Candidates, turn: Turn) -> LayerCache:
    """Every candidate stays, in order."""
    k, v = pack(candidates.k, candidates.v, turn.pages, cache.k.dtype)
    return cache.replace(k=k, v=v, length=candidates.length, next=candidates.length, pages=turn.pages)


def keep_where(cache: LayerCache, candidates: Candidates, keep: Bool[Array, "B H N"], turn: Turn) -> LayerCache:
    """The candidates marked ``keep`` stay, in order; the mask must be False beyond their length."""
    slots = max(turn.pages) * cache.k.shape[3]
    rank = jnp.cumsum(keep, axis=-1)
    length = rank[..., -1].astype(jnp.int32)
    # Slot i takes the (i + 1)-th kept row: the first position whose running count reaches i + 1.
    flat = rank.reshape(-1, rank.shape[-1])
    wanted = jnp.arange(1, slots + 1)
    source = jax.vmap(lambda r: jnp.searchsorted(r, wanted))(flat).reshape(*rank.shape[:-1], slots)
    source = jnp.minimum(source, keep.shape[-1] - 1)[..., None]
    k, v = pack(
        jnp.take_along_axis(candidates.k, source, axis=2),
        jnp.take_along_axis(candidates.v, source, axis=2),
        turn.pages,
        cache.k.dtype,
    )
    return cache.replace(k=k, v=v, length=length, next=length, pages=turn.pages)


def share(ratio: float, total: HostOrTraced | int) -> Any:
    """``floor(ratio * total)``, forgiving the last bit of a float32 product: 0.3 of 10 tokens is 3."""
    xp = numpy_or_jax(total)
    return xp.floor(xp.float32(ratio) * xp.asarray(total).astype(xp.float32) + xp.float32(1e-3)).astype(xp.int32)


def numpy_or_jax(x: Any) -> Any:
    """The array module of ``x``."""
    return jnp if isinstance(x, jax.Array) else np


def page_capacities(policy: Policy, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
    """The policy's capacities in pages [layer][head]."""
    slots = policy.capacities(config, prompt, new)
    if len(slots) != config.num_layers or any(len(heads) != config.num_kv_heads for heads in slots):
        raise UsageError(
            f"{type(policy).__name__}.capacities must give {config.num_layers} layers of {config.num_kv_heads} heads; "
            f"it gave {[len(heads) for heads in slots]}."
        )
    return tuple(tuple(pages_for(count) for count in heads) for heads in slots)
