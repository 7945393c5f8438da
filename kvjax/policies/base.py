"""What a policy is: which tokens stay, as pure functions of arrays. Read this before any policy, or to write one.

A policy is a frozen, hashable dataclass, a static argument of the compiled programs. The runtime calls it

* on the host, before anything is allocated: :meth:`Policy.check`, :meth:`Policy.capacities`;
* in the compiled prefill, once a layer with the layer's whole keys and values: :meth:`Policy.compress`, which asks
  :meth:`Policy.select` which rows stay; before the queries of a later chunk attend, :meth:`Policy.sort_slots`;
* in the compiled decode step, once a layer: :meth:`Policy.append` before attention and :meth:`Policy.observe` after
  it, so that the new token takes part in attention before one leaves (a budget of B needs B + 1 slots);
* between steps, still inside the compiled loop, when :meth:`Policy.due` says so: :meth:`Policy.maintain`.

Capacities are static bounds for a bucket of lengths; budgets are traced and come from each row's own true length. A
number a slot (a score, a position) is a mark and moves with its row; other state a policy needs beside the pool
(running means, counters) lives in ``LayerCache.state`` as a pytree whose leaves all lead with the batch axis. What
attention should hand over is declared by :attr:`Policy.signals`.

A policy may be given some of a layer's heads only, as a cache of its own (``cache/groups.py``, and on a mesh of devices
``cache/share.py``): it takes the number of heads from its arrays or from the ``config`` of a Turn or Step, never from
elsewhere; the second axis of its state, where there is one, is heads. What looks at several heads of a layer, or at a
head's number, asks ``cache.sharding`` for the others'. A policy from elsewhere is one such class passed as ``policy=``;
:func:`register` gives it a name for the command line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pool import PAGE_SIZE, LayerCache, append_token, empty_layer, pages_for
from kvjax.cache.quantisation import MODEL, Storage
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.policies.selection import (
    Candidates,
    PromptChunk,
    Selection,
    gather_candidates,
    keep_all,
    keep_where,
    selection,
    top_mask,
)
from kvjax.policies.signals import Signals

__all__ = [
    "Candidates",
    "HostOrTraced",
    "Policy",
    "PromptChunk",
    "Selection",
    "Signals",
    "Step",
    "append_new",
    "floor_fraction",
    "gather_candidates",
    "keep_all",
    "keep_where",
    "numpy_or_jax",
    "page_capacities",
    "policy_marks",
    "selection",
    "top_mask",
]

#: Budgets are solved by one formula on the host, in NumPy, and in compiled programs.
HostOrTraced = np.ndarray | Array


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

    #: Marks the pool holds for this policy: [B, P, R] numbers by name ("position..." is int32, the rest float32).
    marks: ClassVar[tuple[str, ...]] = ()
    #: Whether decoding needs ever more slots, so that the pools are repacked into the next bucket now and then.
    grows: ClassVar[bool] = True
    #: Whether capacities are planned anew on a later turn, from all tokens; a ring that keeps its size says False.
    replans: ClassVar[bool] = True
    #: Whether :meth:`due` and :meth:`maintain` are to be called.
    maintains: ClassVar[bool] = False
    #: Whether slot 0 may stand for many tokens (``LayerCache.log_mass`` is allocated).
    merges: ClassVar[bool] = False
    #: Whether it says where the rounds of a conversation are instead of choosing tokens (``kvjax/rounds`` runs it).
    offloads_rounds: ClassVar[bool] = False
    #: Whether a layer's heads differ in nothing but what they hold, so that a device may be given some of them.
    heads_alike: ClassVar[bool] = True

    @property
    def signals(self) -> Signals:
        """What attention must hand over."""
        return Signals()

    def window_scale(self, config: ModelConfig, total: Int[Array, " B"]) -> Float[Array, " B"]:
        """What multiplies q.k in the softmax of the window's mass, for rows of ``total`` tokens seen."""
        return jnp.full(total.shape, config.attention_scale, jnp.float32)

    def check(self, config: ModelConfig) -> None:
        """Refuse a model this policy cannot run on, in one sentence (UsageError)."""

    @property
    def beyond_context(self) -> bool:
        """Whether a conversation may run past the model's context."""
        return False

    @property
    def only_appends(self) -> bool:
        """Whether a slot, once written, stays as it is: what a turn added is then forgotten by its lengths alone."""
        changing = ("sort_slots", "select", "compress", "append", "observe", "maintain")
        return not self.merges and all(getattr(type(self), name) is getattr(Policy, name) for name in changing)

    def chunks(self, config: ModelConfig) -> tuple[int, int] | None:
        """(first, rest) tokens per prefill chunk, or None to take prompts whole."""
        return None

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        """Slots [layer][KV head] that suffice for any row of at most ``prompt`` tokens and ``new`` decoded after it."""
        return ((prompt + new,) * config.num_kv_heads,) * config.num_layers

    def planned(self, config: ModelConfig, prompt: int) -> Policy:
        """What holds the cache of a row of ``prompt`` tokens, for plans: itself, unless it places rounds."""
        return self

    def heads_of(self, config: ModelConfig, layer: int) -> int:
        """KV heads of a layer that this policy has."""
        return config.num_kv_heads

    def owners(self, config: ModelConfig, layer: int) -> tuple[Policy, ...]:
        """The policy of each of these KV heads: this one, unless it composes others."""
        return (self,) * self.heads_of(config, layer)

    def budgets(self, config: ModelConfig, layer: int, total: HostOrTraced) -> HostOrTraced:
        """Slots each head of a row holds right after a prompt of ``total`` tokens was compressed."""
        xp = numpy_or_jax(total)
        return xp.broadcast_to(total[:, None], (len(total), config.num_kv_heads)).astype(xp.int32)

    def init_state(self, config: ModelConfig, layer: int, batch: int, slots: tuple[int, ...]) -> Any:
        """The policy's own arrays of one layer, leaves leading with the batch axis; None when it needs none."""
        return None

    def init_layer(
        self, config: ModelConfig, layer: int, batch: int, pages: tuple[int, ...], dtype: Any, storage: Storage = MODEL
    ) -> Any:
        """An empty cache of one layer; a policy that composes others gives :class:`HeadGroups` of theirs."""
        marks = policy_marks(self, config)
        empty = empty_layer(batch, pages, config.head_dim, dtype, log_mass=self.merges, marks=marks, storage=storage)
        return empty.replace(state=self.init_state(config, layer, batch, empty.slots))

    def sort_slots(self, layer: int, cache: LayerCache, config: ModelConfig) -> LayerCache:
        """Put a cache that has decoded in order, at the start of a later turn and before its queries attend."""
        return cache

    def select(self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> Selection:
        """Which candidates stay. Here: all."""
        return selection(cache, candidates, candidates.valid)

    def compress(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H T D"], v: Float[Array, "B H T D"], chunk: PromptChunk
    ) -> LayerCache:
        """Select over the kept slots and the new tokens; the result holds ``turn.pages``.

        Kept rows stay in the candidates' order, which is that of their positions. A policy with an order of its own
        overrides this instead of :meth:`select`.
        """
        candidates = gather_candidates(cache, k, v, chunk)
        if type(self).select is Policy.select:
            return keep_all(cache, candidates, chunk)
        chosen = self.select(layer, cache, candidates, chunk)
        candidates = dataclasses.replace(candidates, marks=chosen.marks)
        return keep_where(cache, candidates, chosen.keep, chunk).replace(state=chosen.state)

    def append(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H D"], v: Float[Array, "B H D"], step: Step
    ) -> LayerCache:
        """Write the new token of each active row, before attention."""
        cache = append_new(cache, k, v, step)
        return cache.replace(next=cache.length)

    def observe(self, layer: int, cache: LayerCache, logits: Float[Array, "B P G R"] | None, step: Step) -> LayerCache:
        """After attention: accumulate what the policy counts, and choose the slot written ``next``.

        Keys and values stay as they are. A TPU asks for some rows at a time where logits were declared.
        """
        return cache

    def retained(self, cache: LayerCache) -> Int[Array, "B H"]:
        """Slots of each head that hold a token still attended to."""
        return cache.length

    def due(self, layers: tuple[LayerCache, ...], config: ModelConfig) -> Bool[Array, " B"]:
        """Rows that must be maintained before they may append again."""
        return jnp.zeros(layers[0].length.shape[0], bool)

    def maintain(
        self, layer: int, cache: LayerCache, config: ModelConfig, row: Int[Array, ""], seen: Int[Array, ""]
    ) -> LayerCache:
        """Compact one row that is due, in place; ``seen`` is its tokens. Afterwards it must not be due any more."""
        return cache


def policy_marks(policy: Policy, config: ModelConfig) -> tuple[str, ...]:
    """Marks of a policy's pools; a model that adds ALiBi's bias needs every slot's position."""
    wanted = config.positional == "alibi" and "position" not in policy.marks
    return (*policy.marks, "position") if wanted else policy.marks


def append_new(
    cache: LayerCache,
    k: Float[Array, "B H D"],
    v: Float[Array, "B H D"],
    step: Step,
    marks: Mapping[str, Array] | None = None,
) -> LayerCache:
    """Write the step's token at ``next`` with its marks: its position, and [B, H] others by name (0 if not given)."""
    position = jnp.broadcast_to(step.position[:, None], cache.next.shape)
    return append_token(cache, k, v, step.active, {"position": position, **(marks or {})})


def floor_fraction(ratio: float, total: HostOrTraced | int) -> Any:
    """``floor(ratio * total)``, in whole numbers: exactly as many on the host, which allocates, as when compiled.

    Float32 will not do: XLA fuses a product with the sum that forgives its last bit, and then the two differ. The
    ratio is rounded up to 40 bits, so that 0.3 of 10 tokens is 3; ``total`` is below 2 ** 21.
    """
    xp = numpy_or_jax(total)
    tokens = xp.asarray(total).astype(xp.int32)
    bits = math.ceil(float(ratio) * 2**40)
    below = 0  # long multiplication, ten bits at a time
    for shift in (0, 10, 20, 30):
        below = (tokens * (bits >> shift & 1023) + below) >> 10
    return tokens * (bits >> 40) + below


def numpy_or_jax(x: Any) -> Any:
    """The array module of ``x``."""
    return jnp if isinstance(x, jax.Array) else np


def page_capacities(
    policy: Policy, config: ModelConfig, prompt: int, new: int, page_size: int = PAGE_SIZE
) -> tuple[tuple[int, ...], ...]:
    """The policy's capacities in pages [layer][head]."""
    slots = policy.capacities(config, prompt, new)
    wanted = [policy.heads_of(config, layer) for layer in range(config.num_layers)]
    if [len(heads) for heads in slots] != wanted:
        raise UsageError(
            f"{type(policy).__name__}.capacities must give {config.num_layers} layers of {config.num_kv_heads} heads; "
            f"it gave {[len(heads) for heads in slots]}."
        )
    return tuple(tuple(pages_for(count, page_size) for count in heads) for heads in slots)
