"""The interface of a policy: which tokens of a KV cache stay. Read this to write one.

A policy is a frozen, hashable dataclass whose fields are its options; it holds no arrays, and is a static argument of
the compiled programs. The smallest useful policy overrides two methods:

    @dataclasses.dataclass(frozen=True)
    class Recent(Policy):
        window: int = 64

        def budgets(self, config, layer, total):            # how many tokens stay of rows of ``total`` tokens: [B, H]
            return per_head(numpy_or_jax(total).minimum(total, self.window), config)

        def select(self, layer, cache, candidates, chunk):  # which ones: a mask [B, H, N]
            index = jnp.arange(candidates.k.shape[2])
            keep = index >= candidates.length[..., None] - self.window
            return selection(cache, candidates, keep & candidates.valid)

Pass an instance as ``policy=``, or give the class a name with :func:`kvjax.policies.register`. A policy that has a
budget or a ratio, and a score for each token, derives from :class:`~kvjax.policies.sized.Selecting`; one that drops a
token at every decode step from :class:`~kvjax.policies.evicting.Evicting`.

The runtime calls a policy in this order:

1. on the host, before anything is allocated: :meth:`Policy.check`, then :meth:`Policy.capacities`;
2. in the compiled prefill, once for each layer with all of that layer's new keys and values: :meth:`Policy.compress`,
   which asks :meth:`Policy.select` which tokens stay. On a later turn :meth:`Policy.sort_slots` comes first, before the
   new queries attend to what was kept;
3. in each compiled decode step, once for each layer: :meth:`Policy.append` before attention and :meth:`Policy.observe`
   after it, so that the new token takes part in attention before one leaves (a budget of n tokens needs n + 1 slots);
4. between decode steps, inside the compiled loop, if the class sets ``maintains``: :meth:`Policy.due`, and
   :meth:`Policy.maintain` for each row that is due.

Capacities and budgets are two things. A capacity is a static number of slots to allocate, for a bucket of prompt
lengths; a budget is a traced number of tokens to keep, from each row's own length.

Where a policy keeps its numbers: one number for each slot (a score, a position) is declared in ``marks`` and moves with
its slot; other arrays go to ``LayerCache.state``, a pytree whose leaves all begin with the batch axis, and whose second
axis, where there is one, is KV heads. What a policy needs from attention is declared by :attr:`Policy.signals`.

A policy may be given only some of a layer's KV heads, as a cache of their own (``cache/groups.py``; on a mesh also
``cache/page_sharding.py``). It therefore takes the number of heads from its arrays or from the ``config`` of a
PromptChunk or Step. A policy that compares the heads of a layer, or uses a head's number, asks ``cache.sharding``.

What the runtime asks of a policy that holds others, or stands beside others, is in :mod:`kvjax.policies.composition`.

In the shapes of this package: B rows of the batch, H KV heads, G query heads for each KV head, T new tokens, N
candidates, D channels of a head, P pages of R slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.groups import split_heads
from kvjax.cache.pool import LayerCache, append_token, empty_layer
from kvjax.cache.quantisation import MODEL, Storage
from kvjax.model.config import ModelConfig
from kvjax.policies.candidates import (
    Candidates,
    PromptChunk,
    Selection,
    Weighed,
    gather_candidates,
    keep_all,
    keep_where,
    selection,
    top_mask,
)
from kvjax.policies.composition import Composable, is_own
from kvjax.policies.signals import Signals
from kvjax.policies.token_counts import HostOrTraced, floor_fraction, numpy_or_jax, per_head
from kvjax.policies.traced_checks import check_selection, check_state

__all__ = [
    "Candidates",
    "HostOrTraced",
    "Policy",
    "PromptChunk",
    "Selection",
    "Signals",
    "Step",
    "Weighed",
    "append_new",
    "floor_fraction",
    "gather_candidates",
    "keep_all",
    "keep_where",
    "numpy_or_jax",
    "per_head",
    "selection",
    "top_mask",
]

#: Lengths of a head of which more was kept than there was, of one with values that are no numbers, and of one whose
#: tokens have scores that are none.
BEYOND, NOT_FINITE, UNRANKED = -1, -2, -3
#: Lengths after a step that went wrong, far below what later steps may add to them: of a row that is still due once it
#: was compacted, and of a head whose next slot is none of its own.
STILL_DUE, BEFORE_THE_FIRST = -(2**30), -(2**29)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """One decode step.

    Attributes:
      position: [B] position of the new token (tokens seen before it).
      active: [B] rows that are still generating; the others must not change by a bit.
      config: the model, static.
      sink_logits: [B, H, G] logits that the layer's softmaxes have beside those of the slots, or None.
    """

    position: Int[Array, " B"]
    active: Bool[Array, " B"]
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    sink_logits: Float[Array, "B H G"] | None = None

    def of_heads(self, heads: tuple[int, ...], config: ModelConfig) -> Step:
        """The step as some of the KV heads see it, with the model as they do."""
        sink_logits = None if self.sink_logits is None else self.sink_logits[:, np.asarray(heads)]
        return dataclasses.replace(self, config=config, sink_logits=sink_logits)


@dataclasses.dataclass(frozen=True)
class Policy(Composable):
    """Base class of all policies; as it stands it keeps every token."""

    #: Names of numbers the pool holds for each slot, [B, P, R]; "position..." is int32, the others are float32. The
    #: position of a token is filled in for the policy, other marks are 0 until it sets them.
    marks: ClassVar[tuple[str, ...]] = ()
    #: Whether every decoded token takes another slot, so that pools are repacked into larger buckets while decoding.
    grows: ClassVar[bool] = True
    #: Whether capacities are computed again on a later turn, from all tokens seen; False for a ring of fixed size.
    replans: ClassVar[bool] = True
    #: Whether the decode loop calls :meth:`due` and :meth:`maintain`.
    maintains: ClassVar[bool] = False
    #: Whether slot 0 may stand for many tokens, with ``LayerCache.log_mass`` added to its logit.
    merges: ClassVar[bool] = False
    #: Whether it moves whole rounds of a conversation to host memory instead of choosing tokens (see ``kvjax/rounds``).
    offloads_rounds: ClassVar[bool] = False
    #: Whether the methods treat every layer alike, whatever its number; one layer is then traced for all of them. It
    #: counts only in the class that says it: a subclass may look at the number.
    layers_alike: ClassVar[bool] = False
    #: Whether all heads of a layer are treated alike, so that a device of a mesh may be given some of them.
    heads_alike: ClassVar[bool] = True
    #: Whether the heads of a layer share its slots, and each row decides how many of them each head has. Capacities and
    #: budgets are then those of an equal head; a mesh divides the heads' pages among its devices, and not the heads.
    shares_slots: ClassVar[bool] = False
    #: Whether all layers share their slots, too: the cache is one pool of all heads, layer after layer, and a prompt is
    #: read by all of them before :meth:`weigh` is asked in each and :meth:`choose` in all.
    shares_layers: ClassVar[bool] = False

    @property
    def signals(self) -> Signals:
        """The statistics of attention that this policy needs; nothing else is computed."""
        return Signals()

    def window_scale(self, config: ModelConfig, total: Int[Array, " B"]) -> Float[Array, " B"]:
        """[B] the factor of q.k in the softmax whose attention is summed over the window; the model's own here."""
        return jnp.full(total.shape, config.attention_scale, jnp.float32)

    def hidden_weights(self, config: ModelConfig, layer: int) -> np.ndarray:
        """[H, M + 1] float32, for ``Signals(hidden=True)``: of each KV head a weight a channel, and last what is added.

        Args:
          config: the model with all of its heads. layer: its number among the layers that this policy has.
        """
        raise NotImplementedError

    def check(self, config: ModelConfig) -> None:
        """Raise a UsageError of one sentence for a model this policy cannot run on, or an option without effect."""

    def notice(self, config: ModelConfig, total: int) -> str | None:
        """A sentence on what this policy cannot do for rows of ``total`` tokens, and what would; None if it can."""
        return None

    def useless(self, config: ModelConfig, total: int) -> bool:
        """Whether what :meth:`notice` says of rows of ``total`` tokens leaves no reason to use this policy for them:
        it keeps nothing that it could choose, or saves no byte. Other notices are cautions."""
        return False

    @property
    def beyond_context(self) -> bool:
        """Whether a conversation may run past the model's context, since positions are renumbered."""
        return False

    @property
    def only_appends(self) -> bool:
        """Whether a slot, once written, stays as it is: what a turn added is then forgotten by its lengths alone."""
        changing = ("sort_slots", "select", "compress", "append", "observe", "maintain")
        return not self.merges and all(getattr(type(self), name) is getattr(Policy, name) for name in changing)

    @property
    def changes_while_decoding(self) -> bool:
        """Whether steps do more than to put each new token behind those that are kept."""
        steps = ("append", "observe", "maintain", "maintain_layers")
        return any(getattr(type(self), name) is not getattr(Policy, name) for name in steps)

    @property
    def shares_context(self) -> bool:
        """Whether rows that begin with the same context share slots of it, whatever each of them reads afterwards."""
        return self.only_appends and not self.offloads_rounds

    def shared_slots(self, layer: int, cache: LayerCache, config: ModelConfig) -> Int[Array, "B H"]:
        """The number of slots of each head, the first ones, that no later turn or step changes, moves or drops.

        Rows that begin with the same context share these, and each has the others for itself, in a pool that holds
        nothing else: ``cache.length`` and ``cache.next`` then count from the first that is not shared. A policy that
        needs to know by how many it is shorter is told by :meth:`beyond_shared`. Asked where it ``shares_context``.
        """
        return cache.length

    def beyond_shared(self, state: Any, shared: Int[Array, "B H"] | None) -> Any:
        """A pool's state once its first ``shared`` slots are elsewhere; with None, once they are back."""
        return state

    def own_capacities(self, config: ModelConfig, prompt: int, own: int, new: int) -> tuple[tuple[int, ...], ...]:
        """Slots [layer][KV head] that suffice for what rows do not share of a context.

        Args:
          prompt: tokens of the longest row, the context included. own: those beyond the context. new: decoded after it.
        """
        return self.capacities(config, own if self.only_appends else prompt, new)

    def chunks(self, config: ModelConfig) -> tuple[int, int] | None:
        """(tokens of the first prefill chunk, tokens of each later one), or None to read prompts whole."""
        return None

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        """Slots [layer][KV head] that suffice for any row of at most ``prompt`` tokens and ``new`` decoded after it.

        Here: the budgets of the longest row, and a slot for each decoded token. A policy whose budgets may fall as
        rows grow, or that drops tokens while decoding, gives its own.
        """
        total = np.asarray([prompt], np.int32)
        budgets = (self.budgets(config, layer, total)[0] for layer in range(config.num_layers))
        return tuple(tuple(int(count) + new for count in heads) for heads in budgets)

    def layer_kind(self, config: ModelConfig, layer: int) -> Hashable | None:
        """The kind of a layer: those of one kind are treated alike and traced once; None where each may be its own."""
        return 0 if type(self).__dict__.get("layers_alike") else None

    def budgets(self, config: ModelConfig, layer: int, total: HostOrTraced) -> HostOrTraced:
        """[B, H] slots that each head of a row holds right after a prompt, of rows that have seen [B] ``total`` tokens.

        Called with NumPy arrays for plans; see :func:`numpy_or_jax` and :func:`per_head`.
        """
        return per_head(total, config)

    def init_state(self, config: ModelConfig, layer: int, batch: int, slots: tuple[int, ...]) -> Any:
        """The initial ``LayerCache.state`` of one layer, each leaf [batch, ...]; None if the policy needs none."""
        return None

    def init_layer(
        self, config: ModelConfig, layer: int, batch: int, pages: tuple[int, ...], dtype: Any, storage: Storage = MODEL
    ) -> Any:
        """An empty cache of one layer; a policy that composes others gives :class:`HeadGroups` of theirs."""
        marks = policy_marks(self, config)
        has = {"log_mass": self.merges, "marks": marks, "storage": storage, "by_row": self.shares_slots}
        empty = empty_layer(batch, pages, config.head_dim, dtype, **has)
        if not self.shares_layers:
            return empty.replace(state=self.init_state(config, layer, batch, empty.slots))
        each = enumerate(split_heads(empty.slots, config.num_layers))
        states = tuple(self.init_state(config, i, batch, slots) for i, slots in each)
        state = None if all(state is None for state in states) else states
        return empty.replace(state=state, model_layers=config.num_layers)

    def sort_slots(self, layer: int, cache: LayerCache, config: ModelConfig) -> LayerCache:
        """Order the slots by position at the start of a later turn, before the new queries attend.

        Only a policy whose slots are in another order, or hold tokens that have left, needs it.
        """
        return cache

    def select(self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> Selection:
        """Choose the candidates that stay; here all of them."""
        return selection(cache, candidates, candidates.valid)

    def weigh(self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> Weighed:
        """The scores of a layer's candidates, in place of :meth:`select` where all layers share their slots."""
        raise NotImplementedError

    def choose(self, layers: Sequence[Weighed], count: Int[Array, " B"]) -> list[Bool[Array, "B H N"]]:
        """The candidates that stay of every layer; a row has ``count`` new tokens, and none stays that is not valid."""
        raise NotImplementedError

    def compress(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H T D"], v: Float[Array, "B H T D"], chunk: PromptChunk
    ) -> LayerCache:
        """Add a chunk's keys and values to the cache and keep what :meth:`select` chooses, in pools of ``chunk.pages``.

        Tokens that stay remain in the order of the candidates, which is that of their positions. A policy with an
        order of its own overrides this method instead of :meth:`select`.
        """
        candidates = gather_candidates(cache, k, v, chunk)
        if type(self).select is Policy.select:
            return keep_all(cache, candidates, chunk)
        chosen = self.select(layer, cache, candidates, chunk)
        if is_own(self):
            check_selection(type(self).__name__, chosen, candidates)
        v = candidates.v if chosen.v is None else chosen.v
        kept = keep_where(cache, dataclasses.replace(candidates, v=v, marks=chosen.marks), chosen.keep, chunk)
        if is_own(self):  # those of kvjax have tests; the host refuses a head of this length, see policies/guard.py
            rows = len(candidates.length)
            initial = jax.eval_shape(lambda: self.init_state(chunk.config, layer, rows, kept.slots))
            check_state(type(self).__name__, chosen.state, initial)
            wrong = (chosen.keep & ~candidates.valid).any(axis=-1) | (cache.length < 0)
            kept = kept.replace(length=jnp.where(wrong, BEYOND, kept.length))
            if chosen.v is not None:
                garbage = (chosen.keep & ~jnp.isfinite(chosen.v).all(axis=-1)).any(axis=-1)
                kept = kept.replace(length=jnp.where(garbage, NOT_FINITE, kept.length))
        if chosen.unranked is not None:
            kept = kept.replace(length=jnp.where(chosen.unranked, UNRANKED, kept.length))
        return kept.replace(state=chosen.state)

    def append(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H D"], v: Float[Array, "B H D"], step: Step
    ) -> LayerCache:
        """Write the new token of each active row to the slot ``cache.next``, before attention."""
        cache = append_new(cache, k, v, step)
        return cache.replace(next=cache.length)

    def observe(self, layer: int, cache: LayerCache, logits: Float[Array, "B P G R"] | None, step: Step) -> LayerCache:
        """Update scores and choose the slot that is written ``next``, after attention; keys and values do not change.

        ``logits`` are the new query's scaled scores of every slot, if :attr:`signals` declares ``decode_logits``. On a
        TPU it is then called for a few rows of the batch at a time.
        """
        return cache

    def retained(self, cache: LayerCache) -> HostOrTraced:
        """[B, H] slots of each head that hold a token which is still attended to; NumPy's of NumPy's counters."""
        return cache.length

    def due(self, layers: tuple[LayerCache, ...], config: ModelConfig) -> Bool[Array, " B"]:
        """The rows for which :meth:`maintain` must be called before they append another token."""
        return jnp.zeros(layers[0].length.shape[0], bool)

    def maintain(
        self, layer: int, cache: LayerCache, config: ModelConfig, row: Int[Array, ""], seen: Int[Array, ""]
    ) -> LayerCache:
        """Compact one ``row`` that is due and has seen ``seen`` tokens; afterwards it must not be due."""
        return cache

    def maintain_layers(
        self, layers: Sequence[Any], config: ModelConfig, row: Int[Array, ""], seen: Int[Array, ""]
    ) -> list[Any] | None:
        """:meth:`maintain` of all layers at once, where that is much less to compile; None for one after another."""
        return None


def policy_marks(policy: Policy, config: ModelConfig) -> tuple[str, ...]:
    """The marks of a policy's pools; in an ALiBi model they include every slot's position."""
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
