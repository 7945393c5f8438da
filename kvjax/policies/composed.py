"""Composition: some KV heads of a layer keep everything, the others are another policy's; each group is a layer.

A policy says which heads are protected and who has the rest; everything else is here, once for all such policies: every
call of the runtime goes to the groups' policies with the arrays, the signals, the pages and the configuration of their
heads alone. A token policy never knows that it has but some of a layer's heads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable
from typing import Any, ClassVar, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.groups import HeadGroups, Layer, pages_by_group, parts, with_parts
from kvjax.cache.quantisation import MODEL, Storage
from kvjax.errors import UsageError, quoted
from kvjax.model.config import ModelConfig
from kvjax.policies.base import HostOrTraced, Policy, PromptChunk, Signals, Step, numpy_or_jax
from kvjax.policies.compensated import CompensatedRing
from kvjax.policies.full import Full
from kvjax.policies.inner import with_size
from kvjax.policies.option_checks import refuse_shared_layers

FULL = Full()

Value = TypeVar("Value")

#: A group of heads: its policy, its KV heads, and the model as that policy sees it.
Member = tuple[Policy, tuple[int, ...], ModelConfig]


@dataclasses.dataclass(frozen=True)
class HeadWise(Policy):
    """Base of policies that protect some KV heads and give the others to one policy of tokens."""

    grows: ClassVar[bool] = True
    #: Whether none is protected: it goes over whole layers, and so over the heads of them that a device of a mesh has.
    whole_layers: ClassVar[bool] = False

    def protected(self, config: ModelConfig) -> tuple[tuple[int, ...], ...]:
        """The KV heads of each layer that keep everything."""
        raise NotImplementedError

    def others(self, config: ModelConfig) -> Policy:
        """The policy of all other heads."""
        raise NotImplementedError

    @property
    def unsized(self) -> Policy:
        """The policy of all other heads before its size was chosen for a model: its kind is what matters."""
        raise NotImplementedError

    def members(self, config: ModelConfig, layer: int) -> list[Member]:
        """The layer's groups; protected heads first, and no group without heads."""
        kept = self.protected(config)[layer]
        rest = tuple(head for head in range(config.num_kv_heads) if head not in kept)
        groups = [(FULL, kept), (self.others(config), rest)]
        return [(policy, heads, with_heads(config, len(heads))) for policy, heads in groups if heads]

    def layer_kind(self, config: ModelConfig, layer: int) -> Hashable | None:
        if super().layer_kind(config, layer) is None:
            return None
        groups = [(policy, heads, policy.layer_kind(own, layer)) for policy, heads, own in self.members(config, layer)]
        return None if any(kind is None for *_, kind in groups) else tuple(groups)

    def check_others(self, config: ModelConfig) -> None:
        """Refuse (UsageError) what the other heads' policy refuses."""
        others = self.others(config)
        # A layer whose heads are all protected is none of theirs; only a profile of their own is of the whole model.
        reach = [layer + 1 for layer, heads in enumerate(self.protected(config)) if len(heads) < config.num_kv_heads]
        if reach:
            others.check(config if others.signals.hidden else dataclasses.replace(config, num_layers=reach[-1]))

    # --- what the groups' policies say, together --------------------------------------------------------------

    @property
    def signals(self) -> Signals:
        return self.unsized.signals

    @property
    def maintains(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the inner policy maintains its heads."""
        return self.unsized.maintains

    def window_scale(self, config: ModelConfig, total: Int[Array, " B"]) -> Float[Array, " B"]:
        return self.others(config).window_scale(config, total)

    def hidden_weights(self, config: ModelConfig, layer: int) -> np.ndarray:
        return self.others(config).hidden_weights(config, layer)

    def chunks(self, config: ModelConfig) -> tuple[int, int] | None:
        return self.others(config).chunks(config)

    def notice(self, config: ModelConfig, total: int) -> str | None:
        return self.others(config).notice(config, total)

    def useless(self, config: ModelConfig, total: int) -> bool:
        return self.others(config).useless(config, total)

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            _joined(
                (heads, capacities_of(policy, seen_as, prompt, new)[layer])
                for policy, heads, seen_as in self.members(config, layer)
            )
            for layer in range(config.num_layers)
        )

    @property
    def shares_context(self) -> bool:
        """Protected heads share; the others where their policy does."""
        return True

    def beyond_shared(self, state: Any, shared: Int[Array, "B H"] | None) -> Any:
        return None if state is None else self.unsized.beyond_shared(state, shared)

    def own_capacities(self, config: ModelConfig, prompt: int, own: int, new: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            _joined(
                (heads, _own_capacities_of(policy, seen_as, prompt, own, new)[layer])
                for policy, heads, seen_as in self.members(config, layer)
            )
            for layer in range(config.num_layers)
        )

    def pool_policies(self, config: ModelConfig, layer: int) -> tuple[tuple[Policy, ModelConfig], ...]:
        return tuple((policy, seen_as) for policy, _, seen_as in self.members(config, layer))

    def owners(self, config: ModelConfig, layer: int) -> tuple[Policy, ...]:
        return _joined((heads, (policy,) * len(heads)) for policy, heads, _ in self.members(config, layer))

    def budgets(self, config: ModelConfig, layer: int, total: HostOrTraced) -> HostOrTraced:
        xp = numpy_or_jax(total)
        members = self.members(config, layer)
        columns = [policy.budgets(seen_as, layer, total) for policy, _, seen_as in members]
        return xp.concatenate(columns, axis=1)[:, np.argsort(np.concatenate([heads for _, heads, _ in members]))]

    def init_layer(
        self, config: ModelConfig, layer: int, batch: int, pages: tuple[int, ...], dtype: Any, storage: Storage = MODEL
    ) -> Any:
        members = self.members(config, layer)
        pools = tuple(
            policy.init_layer(seen_as, layer, batch, tuple(pages[head] for head in heads), dtype, storage)
            for policy, heads, seen_as in members
        )
        return pools[0] if len(pools) == 1 else HeadGroups(pools, tuple(heads for _, heads, _ in members))

    # --- what the groups' policies do, each to its own --------------------------------------------------------

    def sort_slots(self, layer: int, cache: Layer, config: ModelConfig) -> Any:
        members = zip(self.members(config, layer), parts(cache), strict=True)
        return with_parts(cache, [policy.sort_slots(layer, pool, seen_as) for (policy, _, seen_as), pool in members])

    def compress(
        self, layer: int, cache: Layer, k: Float[Array, "B H T D"], v: Float[Array, "B H T D"], chunk: PromptChunk
    ) -> Any:
        done = []
        pages = pages_by_group(cache, chunk.pages)
        for (policy, heads, seen_as), pool, counts in zip(
            self.members(chunk.config, layer), parts(cache), pages, strict=True
        ):
            given = chunk.signals.of_heads(heads) if chunk.signals is not None and policy is not FULL else None
            # A policy that keeps its size on later turns gets the pages it has.
            counts = counts if chunk.fresh or policy.replans else pool.pages
            own = dataclasses.replace(chunk, pages=counts, config=seen_as, signals=given)
            index = np.asarray(heads)
            done.append(policy.compress(layer, pool, k[:, index], v[:, index], own))
        return with_parts(cache, done)

    def append(self, layer: int, cache: Layer, k: Float[Array, "B H D"], v: Float[Array, "B H D"], step: Step) -> Any:
        done = []
        for (policy, heads, seen_as), pool in zip(self.members(step.config, layer), parts(cache), strict=True):
            own, index = dataclasses.replace(step, config=seen_as), np.asarray(heads)
            done.append(policy.append(layer, pool, k[:, index], v[:, index], own))
        return with_parts(cache, done)

    def observe(self, layer: int, cache: Layer, logits: Any, step: Step) -> Any:
        members = self.members(step.config, layer)
        scores = logits if isinstance(logits, tuple) else (logits,) * len(members)
        return with_parts(
            cache,
            [
                policy.observe(layer, pool, own, step.of_heads(heads, seen_as))
                for (policy, heads, seen_as), pool, own in zip(members, parts(cache), scores, strict=True)
            ],
        )

    def retained(self, cache: Layer) -> HostOrTraced:
        # A pool in which everything is kept has no state, and a policy without state holds what its length says.
        held = [pool.length if pool.state is None else self.unsized.retained(pool) for pool in parts(cache)]
        return cache.join(held) if isinstance(cache, HeadGroups) else held[0]

    def due(self, layers: tuple[Layer, ...], config: ModelConfig) -> Bool[Array, " B"]:
        pools: list[tuple[Any, ModelConfig]] = [
            (pool, seen_as)
            for layer, cache in enumerate(layers)
            for (policy, _, seen_as), pool in zip(self.members(config, layer), parts(cache), strict=True)
            if policy is not FULL
        ]
        if not pools:
            return jnp.zeros(layers[0].length.shape[0], bool)
        return self.others(config).due(tuple(pool for pool, _ in pools), pools[-1][1])

    def maintain(self, layer: int, cache: Layer, config: ModelConfig, row: Int[Array, ""], seen: Int[Array, ""]) -> Any:
        members = zip(self.members(config, layer), parts(cache), strict=True)
        return with_parts(
            cache, [policy.maintain(layer, pool, seen_as, row, seen) for (policy, _, seen_as), pool in members]
        )


def check_inner(inner: Any) -> None:
    """Refuse (UsageError) what cannot be the policy of some of a layer's heads."""
    if not isinstance(inner, Policy) or isinstance(inner, HeadWise) or inner.offloads_rounds:
        raise UsageError(f"inner is {quoted(inner)}; give a policy of tokens, such as kvjax.StreamingLLM().")
    refuse_shared_layers("A policy of some heads", inner)
    if isinstance(inner, CompensatedRing) and inner.lengths is not None:
        raise UsageError("lengths gives every head of a model its own buffer; an inner policy has only some of them.")
    if not inner.heads_alike:
        raise UsageError(
            f"{type(inner).__name__} has numbers of its own for every head of a model, which a policy within another "
            "one cannot have."
        )
    if inner.beyond_context:
        raise UsageError(
            f"{type(inner).__name__} renumbers positions, which needs heads of equal length; "
            'give it positions="original".'
        )


def sized_others(inner: Policy, ratio: float, protected: tuple[tuple[int, ...], ...], config: ModelConfig) -> Policy:
    """The other heads' policy at the ratio with which the whole cache, protected heads included, keeps ``ratio``.

    Raises:
      UsageError: nothing is left to size, or the protected heads alone keep more.
    """
    # The protected heads hold everything; what is left of the whole is shared by the others.
    total = config.num_layers * config.num_kv_heads
    kept = sum(len(heads) for heads in protected)
    if kept == total:
        raise UsageError("All KV heads are protected, so there is nothing that a ratio could size; protect fewer.")
    if kept >= ratio * total:
        raise UsageError(
            f"ratio={ratio:g} is less than the {kept} protected of {total} KV heads hold alone; "
            f"give at least {math.ceil((kept + 1e-3) / total * 1000) / 1000:g}, or protect fewer heads."
        )
    return with_size(inner, ratio=(ratio * total - kept) / (total - kept))


@functools.lru_cache(maxsize=256)
def with_heads(config: ModelConfig, kv_heads: int) -> ModelConfig:
    """The model as a group of ``kv_heads`` KV heads sees it."""
    return dataclasses.replace(config, num_kv_heads=kv_heads, num_heads=kv_heads * config.group_size)


@functools.lru_cache(maxsize=256)  # asked for once a layer, and all layers come out together
def capacities_of(policy: Policy, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
    """A group's capacities in a cache that is repacked as it grows."""
    if isinstance(policy, CompensatedRing):
        return policy.grown_capacities(config, prompt, new)
    return policy.capacities(config, prompt, new)


@functools.lru_cache(maxsize=256)
def _own_capacities_of(
    policy: Policy, config: ModelConfig, prompt: int, own: int, new: int
) -> tuple[tuple[int, ...], ...]:
    """A group's capacities beyond a context that rows share; a group that does not share holds all of it."""
    if policy.shares_context:
        return policy.own_capacities(config, prompt, own, new)
    return capacities_of(policy, config, prompt, new)


def _joined(groups: Iterable[tuple[tuple[int, ...], tuple[Value, ...]]]) -> tuple[Value, ...]:
    """One value a head out of those of the groups."""
    found = {head: value for heads, values in groups for head, value in zip(heads, values, strict=True)}
    return tuple(found[head] for head in sorted(found))
